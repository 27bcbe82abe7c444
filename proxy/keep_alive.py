"""Keeps silent streams alive: harnesses hang up after minutes without a protocol event."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


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
        self._task: asyncio.Task[None] | None = None

    def add(self, stream: SilentStream) -> None:
        self._streams.add(stream)

    def discard(self, stream: SilentStream) -> None:
        self._streams.discard(stream)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="keep-alive")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._after_s / 4)
            limit = time.monotonic() - self._after_s
            for stream in [one for one in self._streams if one.silent_since <= limit]:
                stream.keep_alive()
