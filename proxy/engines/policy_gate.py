"""The current policy version, and the gate at which new calls wait during a weight update."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bridle.errors import BridleError


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy version and model that the trainer reported last."""

    version: int = 0
    model: str | None = None
    """The served model name if it changes with the version (LoRA), else ``None``."""


class StaleVersion(BridleError, ValueError):
    """The published policy version is older than the current one."""


class PolicyGate:
    """A counter of running calls, which holds new calls back while it is paused.

    Its attributes are plain, so that a call that passes the open gate costs next to nothing. A call
    awaits :meth:`passed` if the gate is ``paused``, then adds 1 to ``running``. When it is over, it
    subtracts 1 and calls :meth:`left` if ``draining`` is set.
    """

    def __init__(self) -> None:
        self.policy = Policy()
        self.version = 0
        """The version of ``policy``."""
        self.paused = False
        self.running = 0
        self.waiting = 0
        self._open = asyncio.Event()
        self._open.set()
        self.draining = 0
        """Number of tasks that wait until no call is running."""
        self._left = asyncio.Event()

    def publish(self, policy: Policy, *, back: bool = False) -> None:
        """Make ``policy`` the current one. Raises :class:`StaleVersion` if its version is older
        than the current one and ``back`` is not set."""
        if policy.version < self.version and not back:
            raise StaleVersion(f"policy version {policy.version} is older than {self.version}")
        self.policy, self.version = policy, policy.version

    async def passed(self) -> None:
        """Wait until the gate is open."""
        self.waiting += 1
        try:
            # The gate may close again before a task that waits here runs.
            while self.paused:
                await self._open.wait()
        finally:
            self.waiting -= 1

    def left(self) -> None:
        """Wake the tasks in :meth:`drained` after a running call is over."""
        self._left.set()

    def pause(self) -> None:
        self.paused = True
        self._open.clear()

    def resume(self) -> None:
        self.paused = False
        self._open.set()

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no call is running. Return ``False`` if some still are after ``timeout_s``."""
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
