"""The current policy version, and the gate at which new calls wait during a weight update.

Both are rows in the store (``store/operations/gates.py``), which the proxy reads again and again
(``proxy/deployment.py``). The gate has what was read last. It lets no call pass on what is older
than ``fresh_until``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

_LOOK_S: Final = 0.02
"""Seconds between two looks at the running calls."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy version and model that the trainer reported last."""

    version: int = 0
    model: str | None = None
    """The served model name if it changes with the version (LoRA), else ``None``."""


class PolicyGate:
    """A counter of running calls, which holds new calls back while it is paused.

    Its attributes are plain, so that a call that passes the open gate costs next to nothing. A call
    awaits :meth:`passed` if the gate is ``paused`` or ``time.monotonic()`` is later than
    ``fresh_until``. Then it adds 1 to ``running``, and subtracts 1 when it is over.
    """

    def __init__(self) -> None:
        self.policy = Policy()
        self.version = 0
        """The version of ``policy``."""
        self.paused = False
        self.running = 0
        self.waiting = 0
        self.fresh_until = math.inf
        """The time until which calls may pass on what was read last; without end for a model whose
        gate has no row."""
        self.read: Callable[[], Awaitable[None]] = _nothing
        """Reads the row, or raises :class:`~bridle.proxy.wire.canonical.ApiError`."""
        self._open = asyncio.Event()
        self._open.set()

    def set(self, policy: Policy, *, paused: bool) -> None:
        """Set what was read."""
        self.policy, self.version, self.paused = policy, policy.version, paused
        if paused:
            self._open.clear()
        else:
            self._open.set()

    async def passed(self) -> None:
        """Wait until the gate is open by what was read a moment ago."""
        self.waiting += 1
        try:
            # The gate may close again before a task that waits here runs.
            while self.paused or time.monotonic() > self.fresh_until:
                await self._open.wait()
                if time.monotonic() > self.fresh_until:
                    await self.read()
        finally:
            self.waiting -= 1

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no call is running. Return ``False`` if some still are after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self.running:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_S)
        return True


async def _nothing() -> None:
    pass
