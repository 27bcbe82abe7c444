"""Sessions from rollout workers on other machines, as ``bridle trainer`` asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import orjson

from bridle.worker import HEARTBEAT_S, ROUNDS

SILENCE_S: Final = 6 * HEARTBEAT_S
"""A worker that says nothing for so long is taken to be gone."""


class WorkerFailed(RuntimeError):
    """A round did not come to its end; the message names the worker and says why."""


class RemoteWorkers:
    """Asks workers for a step's sessions, each for its share of the groups."""

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
        self._heard = threading.Lock()

    def sessions(self, step: int) -> list[str]:
        """The ids of the step's sessions; raises :class:`WorkerFailed`."""
        with ThreadPoolExecutor(len(self._urls), "worker") as pool:
            asked = [
                pool.submit(self._round, url, first, groups)
                for url, (first, groups) in zip(self._urls, self._shares(step), strict=True)
                if groups
            ]
            return [session for future in asked for session in future.result()]

    def _shares(self, step: int) -> list[tuple[int, int]]:
        """First group and number of groups of each worker; they differ by at most one."""
        first, shares = step * self._groups, []
        for index in range(len(self._urls)):
            groups = (self._groups + index) // len(self._urls)
            shares.append((first, groups))
            first += groups
        return shares

    def _round(self, url: str, first: int, groups: int) -> list[str]:
        body = {
            "run_id": self._run_id,
            "first": first,
            "groups": groups,
            "group_size": self._group_size,
        }
        found: list[str] = []
        timeout = httpx.Timeout(SILENCE_S)
        try:
            with httpx.stream(
                "POST",
                f"{url}{ROUNDS}",
                json=body,
                headers=self._headers,
                timeout=timeout,
                trust_env=False,
            ) as reply:
                if reply.is_error:
                    reply.read()
                    raise WorkerFailed(f"{url} answered {reply.status_code}: {reply.text[:300]}")
                for line in reply.iter_lines():
                    if not line:
                        continue
                    said = orjson.loads(line)
                    if said.get("done"):
                        return found
                    if "session_id" not in said:
                        raise WorkerFailed(f"{url}: {said.get('error')}")
                    with self._heard:
                        self._on_session(said)
                    if said["session_id"]:
                        found.append(said["session_id"])
        except httpx.HTTPError as error:
            raise WorkerFailed(f"{url}: {type(error).__name__} {error}") from error
        raise WorkerFailed(f"{url} ended in the middle of a round")
