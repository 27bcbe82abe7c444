"""What each call was for: ``main``, ``subagent``, ``compaction``, ``side``, ``retry``, ``unknown``.

``classify`` gives a verdict with its evidence for every call of a session.
"""
