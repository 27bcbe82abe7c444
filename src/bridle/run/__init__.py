"""Runs, which wire the rooms into rollouts, training, services, the demo and the feed.

This package may import every room but the command line, and reports problems as errors.
"""
