"""A check for sessions that another proxy on the same store has sealed.

The proxies of one deployment report their seals to each other
(``proxy/cluster/cluster_control.py``). Proxies of other deployments on the same store do not. While
others write to the store, each proxy therefore checks repeatedly which of its sessions in use are
sealed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from bridle.proxy.periodic import Periodic
from bridle.proxy.session.memory import SessionMemory
from bridle.store.errors import StoreUnavailable
from bridle.store.reading.queries import Reader

log = logging.getLogger("bridle.proxy")

EVERY_S: Final = 2.0
_AT_ONCE: Final = 1000
"""Maximum number of sessions in one check, the ones used last. A session that is not among them
gets few calls or none."""


class SealWatch:
    """Checks every ``every_s`` seconds, in a thread."""

    def __init__(self, memory: SessionMemory, reader: Reader, every_s: float = EVERY_S) -> None:
        self._memory = memory
        self._reader = reader
        self._looks = Periodic("seal-watch", every_s, self._look)

    def start(self) -> None:
        self._looks.start()

    async def close(self) -> None:
        await self._looks.close()

    async def _look(self) -> None:
        latest = self._memory.latest_open(_AT_ONCE)
        if not latest:
            return
        try:
            sealed = await asyncio.to_thread(self._sealed, latest)
        except StoreUnavailable as error:
            log.warning("seals_not_read", extra={"error": str(error)})
            return
        for session_id in sealed:
            self._memory.forget(session_id)

    def _sealed(self, session_ids: list[str]) -> set[str]:
        if len(self._reader.writer_ids()) < 2:
            return set()  # Only this process seals sessions.
        return self._reader.sealed_among(session_ids)
