"""Keeps silent streams alive: harnesses hang up after minutes without a protocol event."""

from __future__ import annotations

import time
from typing import Protocol

from bridle.proxy.periodic import Periodic


class SilentStream(Protocol):
    @property
    def silent_since(self) -> float:
        """``time.monotonic()`` of the last bytes."""
        ...

    def keep_alive(self) -> None: ...


class KeepAlives:
    """One sweep over all open streams, instead of a timer per stream and event."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._streams: set[SilentStream] = set()
        self._sweeps = Periodic("keep-alive", after_s / 4, self._sweep)

    def add(self, stream: SilentStream) -> None:
        self._streams.add(stream)

    def discard(self, stream: SilentStream) -> None:
        self._streams.discard(stream)

    def start(self) -> None:
        self._sweeps.start()

    async def close(self) -> None:
        await self._sweeps.close()

    async def _sweep(self) -> None:
        limit = time.monotonic() - self._after_s
        for stream in [one for one in self._streams if one.silent_since <= limit]:
            stream.keep_alive()
