"""What is kept of a call: its record and commit, metrics, log lines, traces, stored responses.

The recording takes the events that the client's emitter takes; the terminal event waits for it.
"""
