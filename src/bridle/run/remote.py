"""Sessions from rollout workers on other machines, as ``bridle trainer`` asks for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
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
    """Asks workers for groups of sessions, one worker after another; a :class:`StartGroup`.

    Leaving the context ends what runs.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        run_id: str,
        group_size: int,
        key: str | None = None,
        on_session: Callable[[dict[str, Any]], None] = lambda _result: None,
    ) -> None:
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._run_id, self._group_size = run_id, group_size
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._on_session = on_session
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="workers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def __call__(self, number: int, begun: Callable[[], None]) -> Future[Sequence[str]]:
        """Group ``number``; its future raises :class:`WorkerFailed`."""
        begun()
        url = self._urls[number % len(self._urls)]
        return asyncio.run_coroutine_threadsafe(self._round(url, number, 1), self._loop)

    async def _round(self, url: str, first: int, groups: int) -> Sequence[str]:
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
