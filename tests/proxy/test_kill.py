"""``kill -9`` at any moment: all that was acknowledged is there.

The rest is found and marked, and every conversation goes on where its client left it.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedReply
from bridle.proxy.settings import ProxySettings
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallStatus
from support.processes import free_port, serve

pytestmark = pytest.mark.loop

CHAT = "/v1/chat/completions"
ANSWER = "The answer is four."
CLIENTS = 8

FORKS = multiprocessing.get_context("forkserver")
# A proxy's imports take longer than its start: they are made once, and each proxy is forked from
# there.
FORKS.set_forkserver_preload(["bridle.proxy.server"])


class Process:
    """A proxy in a process of its own, on a port that stays the same over restarts."""

    def __init__(self, upstream: str, store: Path) -> None:
        port = free_port()
        self._settings = ProxySettings(upstream_url=upstream, store_url=str(store), port=port)
        self.url = f"http://127.0.0.1:{port}"

    def start(self) -> None:
        self._process = FORKS.Process(target=serve, args=(self._settings,))
        self._process.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(self.url + "/healthz").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.02)
        raise AssertionError("the proxy did not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class Client:
    """One conversation in one session, and the calls whose end its client saw, in order."""

    def __init__(self, url: str, number: int) -> None:
        self.acknowledged: list[str] = []
        self._url = url
        self._path = f"/s/load-{number}{CHAT}"
        self._stream = bool(number % 2)
        self._messages: list[dict[str, str]] = []

    def say(self, client: httpx.Client) -> httpx.Response:
        """One turn. Raises ``httpx.TransportError`` when the proxy dies in it."""
        question = {"role": "user", "content": f"Question {len(self._messages)}?"}
        ask = {"model": "policy", "messages": [*self._messages, question], "stream": self._stream}
        response = client.post(self._path, json=ask)
        if response.status_code == 200 and "stop" in response.text:
            self.acknowledged.append(response.headers["x-request-id"])
            self._messages += [question, {"role": "assistant", "content": ANSWER}]
        return response

    def talk(self, stop: threading.Event) -> None:
        """Until the proxy dies or ``stop`` is set."""
        with httpx.Client(base_url=self._url, timeout=10) as client:
            while not stop.is_set():
                try:
                    self.say(client)
                except httpx.TransportError:
                    return


def load_until(proxy: Process, clients: list[Client], until: Any, moment: float) -> None:
    """All clients talk; a moment after the first of them was answered the proxy is killed."""
    before = sum(len(client.acknowledged) for client in clients)
    stop = threading.Event()
    threads = [threading.Thread(target=client.talk, args=(stop,)) for client in clients]
    for thread in threads:
        thread.start()
    until(lambda: sum(len(client.acknowledged) for client in clients) > before)
    time.sleep(moment)
    proxy.kill()
    stop.set()
    for thread in threads:
        thread.join()


@pytest.fixture
def proxy_process(stage: Any, tmp_path: Path) -> Iterator[Process]:
    process = Process(stage.engine.base_url, tmp_path / "killed.db")
    process.start()
    yield process
    process.kill()


@pytest.mark.parametrize(
    "moments",
    [30, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_no_acknowledged_call_is_lost_or_half_written_and_every_session_goes_on(
    proxy_process: Process, stage: Any, until: Any, tmp_path: Path, moments: int
) -> None:
    stage.play = lambda _: ScriptedReply(ANSWER, delay=0.002)
    chance = random.Random(4)
    clients = [Client(proxy_process.url, number) for number in range(CLIENTS)]
    for _ in range(moments):
        load_until(proxy_process, clients, until, chance.random() * 0.1)
        proxy_process.start()
    with httpx.Client(base_url=proxy_process.url, timeout=30) as asking:
        for client in clients:
            assert client.say(asking).status_code == 200

    with Reader(str(tmp_path / "killed.db")) as reader:
        sessions = list(reader.sessions())
        assert len(sessions) == CLIENTS
        rows = {row.id: row for session in sessions for row in reader.calls(session.id)}
        assert sum(len(client.acknowledged) for client in clients) > moments
        for client in clients:
            said = client.acknowledged
            assert all(rows[call_id].status is CallStatus.COMPLETE for call_id in said)
            parents = [rows[call_id].parent_call_id for call_id in said]
            assert all(
                _same_answer(rows, *pair) for pair in zip(parents, [None, *said], strict=False)
            )
        for row in rows.values():
            # A dead writer's calls are marked once its lease is over or its process is seen gone.
            assert row.status in (CallStatus.COMPLETE, CallStatus.INTERRUPTED)
            if row.status is CallStatus.COMPLETE:
                assert_whole(reader, row)


def _same_answer(rows: dict[str, CallRow], parent: str | None, last: str | None) -> bool:
    """Return whether a call continues the one before it, or that one's twin.

    The twin was complete when the proxy died, but not yet reported.
    """
    if parent is None or last is None:
        return parent is last
    return parent == last or rows[parent].parent_call_id == rows[last].parent_call_id


def assert_whole(reader: Reader, row: CallRow) -> None:
    (sampled,) = reader.sampled(row.id)
    assert len(sampled.token_ids) == row.sampled_tokens
    assert reader.prompt_token_ids(row.id) is not None
    assert reader.request_body(row.id)
    assert reader.response_body(row.id)
