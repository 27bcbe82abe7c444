"""Runs, which wire the rooms into rollouts, training, services and the feed.

This package may import every room but the command line and the recipes. It reports problems as
errors.
"""
