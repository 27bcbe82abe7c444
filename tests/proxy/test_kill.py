"""``kill -9`` at any moment: what was acknowledged is there, what was not is found and marked."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.scripted import Reply
from store.queries import Reader
from store.records import CallStatus

CHAT = "/v1/chat/completions"


class Process:
    """A proxy in a process of its own, on a port that stays the same over restarts."""

    def __init__(self, upstream: str, store: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._arguments = ["--upstream", upstream, "--store", str(store), "--port", str(self.port)]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "proxy", *self._arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(self.url + "/healthz").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError("the proxy did not start")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class Load:
    """Clients that note each call whose end they saw."""

    def __init__(self, url: str, ask: dict[str, Any], clients: int) -> None:
        self.acknowledged: list[str] = []
        self._url, self._ask = url, ask
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(bool(index % 2),)) for index in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, stream: bool) -> None:
        with httpx.Client(base_url=self._url, timeout=10) as client:
            while not self._stop.is_set():
                try:
                    response = client.post(f"/s/load{CHAT}", json=self._ask | {"stream": stream})
                except httpx.TransportError:
                    return
                if response.status_code == 200 and "stop" in response.text:
                    self.acknowledged.append(response.headers["x-request-id"])


@pytest.fixture
def proxy_process(stage: Any, tmp_path: Path) -> Any:
    process = Process(stage.engine.base_url, tmp_path / "killed.db")
    process.start()
    yield process
    process.kill()


def test_no_acknowledged_call_is_lost_and_open_ones_are_marked_at_restart(
    proxy_process: Any, stage: Any, ask: Any, until: Any, tmp_path: Path
) -> None:
    stage.play = lambda _: Reply("The answer is four.", delay=0.002)
    chance = random.Random(4)
    acknowledged: set[str] = set()
    for _ in range(3):
        load = Load(proxy_process.url, ask, clients=8)
        until(lambda load=load: len(load.acknowledged) >= 10)
        time.sleep(chance.random() * 0.1)
        proxy_process.kill()
        load.stop()
        acknowledged.update(load.acknowledged)
        proxy_process.start()

    with Reader(str(tmp_path / "killed.db")) as reader:
        (session,) = reader.sessions()
        rows = {row.id: row for row in reader.calls(session.id)}
        complete = {i for i, row in rows.items() if row.status is CallStatus.COMPLETE}
        others = {row.status for i, row in rows.items() if i not in complete}
        assert len(acknowledged) >= 30
        assert acknowledged <= complete
        # A dead writer's calls are marked once its lease is over or its process is seen gone.
        assert others <= {CallStatus.INTERRUPTED}
        for call_id in complete:
            (sampled,) = reader.sampled(call_id)
            assert len(sampled.token_ids) == rows[call_id].sampled_tokens
            assert reader.prompt_token_ids(call_id) is not None
            assert reader.body(rows[call_id].response_body_id or "")
    reply = httpx.post(f"{proxy_process.url}/s/load{CHAT}", json=ask)
    assert reply.headers["x-bridle-session"] == session.id
