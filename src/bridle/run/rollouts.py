"""Rollouts from synchronous code: one event loop and one runtime for a whole run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Self

from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.client import ControlClient
from bridle.harnesses.rollout import Job, Rollout, RolloutResult, Settings
from bridle.harnesses.sandboxes.base import Runtime
from bridle.harnesses.verifiers import Verifier

NO_CALL_HINT: Final = (
    "does the program read OPENAI_BASE_URL, ANTHROPIC_BASE_URL or GOOGLE_GEMINI_BASE_URL?"
)
"""What to check when an agent ran and no call was recorded."""


class Rollouts:
    """Runs jobs against one proxy with one runtime, which stays warm between calls.

    A trainer that collects ahead does so in a thread of its own, one collection after another, and
    may end in the midst of one: leaving the context cancels it, and returns when its sessions are
    sealed.
    """

    def __init__(
        self, proxy_url: str, runtime: Runtime, verifier: Verifier, *, key: str | None = None
    ) -> None:
        self._proxy_url = proxy_url
        self._key = key
        self._runtime = runtime
        self._verifier = verifier
        self._runner = asyncio.Runner()
        self._turn = threading.Lock()
        """Held while the runner's loop runs."""
        self._running: asyncio.Task[object] | None = None
        self._closing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing = True
        if (running := self._running) is not None:
            running.get_loop().call_soon_threadsafe(running.cancel)
        with self._turn:
            self._runner.run(self._runtime.close())
            self._runner.close()

    def collect(
        self,
        adapter: Adapter,
        jobs: Iterable[Job],
        settings: Settings,
        progress: Callable[[RolloutResult], None] | None = None,
    ) -> list[RolloutResult]:
        """All results, in the order they came. Ctrl-C ends every session that still runs."""
        with self._turn:
            if self._closing:
                raise asyncio.CancelledError
            return self._runner.run(self._collect(adapter, jobs, settings, progress))

    def sessions(
        self,
        adapter: Adapter,
        jobs: Iterable[Job],
        settings: Settings,
        progress: Callable[[RolloutResult], None] | None = None,
    ) -> list[str]:
        """The ids of the sessions that :meth:`collect` ran; a job that got none has none."""
        results = self.collect(adapter, jobs, settings, progress)
        return [result.session_id for result in results if result.session_id]

    async def _collect(
        self,
        adapter: Adapter,
        jobs: Iterable[Job],
        settings: Settings,
        progress: Callable[[RolloutResult], None] | None,
    ) -> list[RolloutResult]:
        self._running = asyncio.current_task()
        try:
            if self._closing:
                raise asyncio.CancelledError
            async with ControlClient(self._proxy_url, self._key) as client:
                rollout = Rollout(client, adapter, self._runtime, self._verifier, settings)
                return await rollout.collect(jobs, progress)
        finally:
            self._running = None
