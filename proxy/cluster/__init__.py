"""Agreement between the proxy processes of a deployment: versions, pauses, engines, seals.

A change that the control API makes in one process is applied in all others before the reply.
"""
