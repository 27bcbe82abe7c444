"""Memory that is free again goes back to the system.

glibc keeps what a burst of long requests once took, so that a proxy would stay as large as in its
busiest moment. Other C libraries give it back by themselves, or have no way to be told.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 10.0
"""Often enough for a burst not to last, rarely enough to cost nothing."""


class FreeMemory:
    """Gives it back every ``every_s`` seconds, in a thread."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            self._task = asyncio.create_task(self._run(trim), name="free-memory")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self, trim: Callable[[int], int]) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await asyncio.to_thread(trim, 0)
