"""Sessions from rollout workers on other machines, as ``bridle trainer`` asks for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import httpx
import orjson

from bridle.errors import BridleError
from bridle.run.worker import HEARTBEAT_S, ROUNDS

SILENCE_S: Final = 6 * HEARTBEAT_S
"""A worker that sends nothing for this long is taken to be gone."""


class WorkerFailed(BridleError):
    """A round of sessions did not complete; the message names the worker and the cause."""

    retryable = True


class RemoteWorkers:
    """Asks workers for a step's sessions, each for its share of the groups.

    A trainer that collects ahead does so in a thread of its own: leaving the context ends that.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        run_id: str,
        groups: int,
        group_size: int,
        key: str | None = None,
        on_session: Callable[[dict[str, Any]], None] = lambda _result: None,
    ) -> None:
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._run_id, self._groups, self._group_size = run_id, groups, group_size
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._on_session = on_session
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
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile, and its loop with it
                running.get_loop().call_soon_threadsafe(running.cancel)

    def sessions(self, step: int) -> list[str]:
        """The ids of the step's sessions; raises :class:`WorkerFailed`.

        A round that fails ends the others, and so do Ctrl-C and leaving the context.
        """
        return asyncio.run(self._sessions(step))

    async def _sessions(self, step: int) -> list[str]:
        self._running = asyncio.current_task()
        try:
            if self._closing:
                raise asyncio.CancelledError
            async with asyncio.TaskGroup() as rounds:
                asked = [
                    rounds.create_task(self._round(url, first, groups))
                    for url, (first, groups) in zip(self._urls, self._shares(step), strict=True)
                    if groups
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self._running = None
        return [session for task in asked for session in task.result()]

    def _shares(self, step: int) -> list[tuple[int, int]]:
        """First group and number of groups of each worker; they differ by at most one."""
        first, shares = step * self._groups, []
        for index in range(len(self._urls)):
            groups = (self._groups + index) // len(self._urls)
            shares.append((first, groups))
            first += groups
        return shares

    async def _round(self, url: str, first: int, groups: int) -> list[str]:
        body = {
            "run_id": self._run_id,
            "first": first,
            "groups": groups,
            "group_size": self._group_size,
        }
        found: list[str] = []
        timeout = httpx.Timeout(SILENCE_S)
        try:
            async with (
                httpx.AsyncClient(
                    headers=self._headers, timeout=timeout, trust_env=False
                ) as client,
                client.stream("POST", f"{url}{ROUNDS}", json=body) as reply,
            ):
                if reply.is_error:
                    await reply.aread()
                    raise WorkerFailed(f"{url} answered {reply.status_code}: {reply.text[:300]}")
                async for line in reply.aiter_lines():
                    if not line:
                        continue
                    message = orjson.loads(line)
                    if message.get("done"):
                        return found
                    if "session_id" not in message:
                        raise WorkerFailed(f"{url}: {message.get('error')}")
                    self._on_session(message)
                    if message["session_id"]:
                        found.append(message["session_id"])
        except httpx.HTTPError as error:
            raise WorkerFailed(f"{url}: {type(error).__name__} {error}") from error
        raise WorkerFailed(f"{url} ended in the middle of a round")
