"""Memory that is free again goes back to the system.

glibc keeps what a burst of long requests once took, so that a proxy would stay as large as in its
busiest moment. Other C libraries give it back by themselves, or have no way to be told.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import Final

from bridle.proxy.periodic import Periodic

EVERY_S: Final = 10.0
"""Often enough for a burst not to last, rarely enough to cost nothing."""


class FreeMemory:
    """Gives it back every ``every_s`` seconds, in a thread."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._trims = trim and Periodic("free-memory", every_s, lambda: asyncio.to_thread(trim, 0))

    def start(self) -> None:
        if self._trims is not None:
            self._trims.start()

    async def close(self) -> None:
        if self._trims is not None:
            await self._trims.close()
