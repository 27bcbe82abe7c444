"""The delay of replies to an address that keeps sending wrong keys."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

_FREE: Final = 20
"""Number of wrong keys that an address may send without a delay."""
_STEP_S: Final = 0.05
_LONGEST_S: Final = 2.0
_FORGOTTEN_S: Final = 60.0
"""Seconds without a wrong key after which an address begins anew."""
_ADDRESSES: Final = 4096
"""Maximum addresses that are remembered; the one longest without a wrong key is forgotten."""


class WrongKeys:
    """The wrong keys of late, by address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """The number of wrong keys, and the time of the last one."""

    def delay(self, address: str | None) -> float:
        """Count a wrong key, and return the seconds to wait before it is refused."""
        now, key = self._clock(), address or ""
        count, before = self._latest.pop(key, (0, now))
        count = 1 if now - before > _FORGOTTEN_S else count + 1
        self._latest[key] = count, now
        if len(self._latest) > _ADDRESSES:
            self._latest.popitem(last=False)
        return min(_LONGEST_S, _STEP_S * max(0, count - _FREE))

    async def refused(self, address: str | None) -> None:
        """Count a wrong key, and wait before it is refused. A right key never waits."""
        if seconds := self.delay(address):
            await asyncio.sleep(seconds)
