"""The policy version of the moment, and the gate that new calls wait at during a weight update."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bridle.errors import BridleError


@dataclass(frozen=True, slots=True)
class Policy:
    """What the engine is serving, as the trainer last said."""

    version: int = 0
    model: str | None = None
    """Served model name when it changes with the version (LoRA); else ``None``."""


class StaleVersion(BridleError, ValueError):
    """A policy version may only grow."""


class PolicyGate:
    """Counts running calls and holds new ones back while paused."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.running = 0
        self.waiting = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @property
    def version(self) -> int:
        return self.policy.version

    def publish(self, policy: Policy, *, back: bool = False) -> None:
        """Raises :class:`StaleVersion` when the version would go back and ``back`` does not say
        that it is meant to."""
        if policy.version < self.policy.version and not back:
            raise StaleVersion(
                f"policy version {policy.version} is older than {self.policy.version}"
            )
        self.policy = policy

    async def enter(self) -> None:
        """Waits while paused, then counts the caller as running; pair it with :meth:`leave`."""
        if not self._open.is_set():
            self.waiting += 1
            try:
                # Again when it was paused once more before the waiting were woken.
                while not self._open.is_set():
                    await self._open.wait()
            finally:
                self.waiting -= 1
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        self.running -= 1
        if self.running == 0:
            self._idle.set()

    def pause(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    async def drained(self, timeout_s: float) -> bool:
        """Waits until no call is running; ``False`` when some still are after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.running:
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True
