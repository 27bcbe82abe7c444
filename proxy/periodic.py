"""An action that the proxy repeats at an interval, beside its calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("bridle.proxy")


class Periodic:
    """Awaits ``action`` every ``every_s`` seconds until it is closed.

    An exception of the action is logged and does not end the repetition.
    """

    def __init__(self, name: str, every_s: float, action: Callable[[], Awaitable[object]]) -> None:
        self._name = name
        self._every_s = every_s
        self._action = action
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def close(self) -> None:
        """End the repetition. Return when an action that was running has been cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._action()
            except Exception:
                log.exception("periodic_failed", extra={"task": self._name})
