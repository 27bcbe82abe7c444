"""The sealing of sessions that nobody ends.

They are the sessions recorded through a base URL alone, and are sealed after a time without calls.
The feed hands out sealed sessions only.

A session with a key of its own was opened by a program, which is expected to end it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from bridle.proxy.periodic import Periodic
from bridle.store.errors import StoreUnavailable
from bridle.store.reading.queries import Reader

log = logging.getLogger("bridle.proxy")

OUTCOME: Final = "idle"
_LOOKS: Final = 4
"""Number of checks in the time that makes a session idle."""
_MOST_S: Final = 60.0


class IdleSeal:
    """Checks the store, in a thread, so that it also finds the sessions of earlier processes."""

    def __init__(
        self, reader: Reader, seal: Callable[[str, str], Awaitable[None]], idle_s: float
    ) -> None:
        """Prepare the sealing of sessions that are idle for ``idle_s``.

        ``seal`` is called with a session's id and outcome. Nothing is sealed if ``idle_s`` is 0.
        """
        self._reader = reader
        self._seal = seal
        self._idle_s = idle_s
        self._looks = Periodic("idle-seal", min(_MOST_S, idle_s / _LOOKS), self._look)

    def start(self) -> None:
        if self._idle_s > 0:
            self._looks.start()

    async def close(self) -> None:
        await self._looks.close()

    async def _look(self) -> None:
        before = time.time() - self._idle_s
        try:
            idle = await asyncio.to_thread(self._reader.idle_sessions, before)
        except StoreUnavailable as error:
            log.warning("idle_sessions_not_read", extra={"error": str(error)})
            return
        for session_id in idle:
            await self._seal(session_id, OUTCOME)
            log.info("session_sealed", extra={"session": session_id, "outcome": OUTCOME})
