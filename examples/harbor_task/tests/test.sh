#!/bin/bash
# 1 for the right totals beside unchanged sales, else 0. The exit code does not count.
if python3 /tests/check.py; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
