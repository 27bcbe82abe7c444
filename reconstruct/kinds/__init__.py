"""The kind of each call.

It is ``main``, ``subagent``, ``compaction``, ``side``, ``retry`` or ``unknown``. ``classify`` gives
a verdict with its evidence for every call of a session.
"""
