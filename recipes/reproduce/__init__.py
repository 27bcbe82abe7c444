"""``bridle reproduce``: the training of an installed coding agent on tasks.

A check in the agent's workspace decides each task.
"""
