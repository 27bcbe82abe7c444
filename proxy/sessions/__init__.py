"""The sessions that calls belong to: access to them, and their state in memory.

``registry`` admits requests, ``harness_identity`` reads their headers, and ``rules`` applies a
session's own settings. ``session`` is one session in memory with its turns and its token tree;
``memory`` holds all of them within one budget and fills them from the store.
"""
