"""Times that are stored: the start by the wall clock, and what follows by a clock that never jumps.

The wall clock is set by people and by time servers. A duration between two readings of it may be
negative, or days long.
"""

from __future__ import annotations

import time


class Stopwatch:
    """The times of one thing that begins now, in seconds since 1970."""

    __slots__ = ("_since", "started_at")

    def __init__(self) -> None:
        self.started_at = time.time()
        self._since = time.monotonic()

    def now(self) -> float:
        """Return the time of the start, and the seconds since then by the monotonic clock."""
        return self.started_at + (time.monotonic() - self._since)
