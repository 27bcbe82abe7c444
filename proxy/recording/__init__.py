"""The record of a call and its commit, metrics, log lines and traces.

A recording takes the same events as the client's emitter; the terminal event waits for the commit.
"""
