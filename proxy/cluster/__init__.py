"""Agreement between the worker processes of one port: versions, pauses, engines, seals.

A change that the control API makes in one worker reaches every other one before it is answered.
"""
