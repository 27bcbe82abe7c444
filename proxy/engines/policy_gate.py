"""The policy version of the moment, and the gate where new calls wait during a weight update."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bridle.errors import BridleError


@dataclass(frozen=True, slots=True)
class Policy:
    """What the trainer last reported that the engines serve."""

    version: int = 0
    model: str | None = None
    """Served model name when it changes with the version (LoRA); else ``None``."""


class StaleVersion(BridleError, ValueError):
    """A policy version may only grow."""


class PolicyGate:
    """Counts running calls and holds new ones back while paused.

    Plain attributes, so that a call that passes the open gate costs next to nothing: it waits with
    :meth:`passed` when ``paused``, adds 1 to ``running``, and when it is over takes 1 off and calls
    :meth:`left` if ``draining``.
    """

    def __init__(self) -> None:
        self.policy = Policy()
        self.version = 0
        """Of ``policy``."""
        self.paused = False
        self.running = 0
        self.waiting = 0
        self._open = asyncio.Event()
        self._open.set()
        self.draining = 0
        """How many tasks wait until no call is running."""
        self._left = asyncio.Event()

    def publish(self, policy: Policy, *, back: bool = False) -> None:
        """Raises :class:`StaleVersion` when the version would go back and ``back`` is not set."""
        if policy.version < self.version and not back:
            raise StaleVersion(f"policy version {policy.version} is older than {self.version}")
        self.policy, self.version = policy, policy.version

    async def passed(self) -> None:
        """Returns when the gate is open."""
        self.waiting += 1
        try:
            # The gate may close again before a task that waits here runs.
            while self.paused:
                await self._open.wait()
        finally:
            self.waiting -= 1

    def left(self) -> None:
        """A running call is over."""
        self._left.set()

    def pause(self) -> None:
        self.paused = True
        self._open.clear()

    def resume(self) -> None:
        self.paused = False
        self._open.set()

    async def drained(self, timeout_s: float) -> bool:
        """Waits until no call is running; ``False`` when some still are after ``timeout_s``."""
        self.draining += 1
        try:
            async with asyncio.timeout(timeout_s):
                while self.running:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        finally:
            self.draining -= 1
        return True
