"""Sessions that another proxy on the same store has sealed.

The workers of one port tell each other (``proxy/governor.py``). Proxies that share no more than a
store do not know of each other: while others write to it, it is asked now and then which of the
sessions in use have been sealed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from proxy.sessions import Sessions
from store.errors import StoreUnavailable
from store.queries import Reader

log = logging.getLogger("bridle.proxy")

EVERY_S: Final = 2.0
_AT_ONCE: Final = 1000
"""The sessions used last; one that is not among them takes no calls, or few."""


class SealWatch:
    """Looks every ``every_s`` seconds, in a thread."""

    def __init__(self, sessions: Sessions, reader: Reader, every_s: float = EVERY_S) -> None:
        self._sessions = sessions
        self._reader = reader
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="seal-watch")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            latest = self._sessions.latest_open(_AT_ONCE)
            if not latest:
                continue
            try:
                sealed = await asyncio.to_thread(self._sealed, latest)
            except StoreUnavailable as error:
                log.warning("seals_not_read", extra={"error": str(error)})
                continue
            for session_id in sealed:
                self._sessions.forget(session_id)

    def _sealed(self, session_ids: list[str]) -> set[str]:
        if len(self._reader.writer_ids()) < 2:
            return set()  # who seals here knows
        return self._reader.sealed_among(session_ids)
