"""Runs: how the rooms are wired into rollouts, training, services, the demo and the feed.

It may import every room but the command line, and reports problems as errors.
"""
