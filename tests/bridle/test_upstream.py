"""Any OpenAI-compatible upstream: what it lacks is said at the start, on its calls and in audits.

The upstreams here stand for servers of others: one without a health route and without token ids,
and one that refuses what it does not know.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from click.testing import Result

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import Limits, ProxySettings
from bridle.run.upstream import examine
from bridle.store.reading.queries import Reader
from bridle.store.records import IDS_MISSING, CallStatus

pytestmark = pytest.mark.usefixtures("warm_start")

Bridle = Callable[..., Result]
REPLY = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "gpt-x",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}


class Plain(BaseHTTPRequestHandler):
    """It has ``/v1/models`` and ``/v1/chat/completions``, no health route, and no token ids."""

    protocol_version = "HTTP/1.1"
    refused: frozenset[str] = frozenset()
    """Fields of a request that it does not take."""
    key: str | None = None

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": "gpt-x", "object": "model"}]})
        else:
            self._send(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.key and self.headers["authorization"] != f"Bearer {self.key}":
            self._send(401, {"error": {"message": "no valid key"}})
        elif unknown := self.refused & asked.keys():
            message = f"Unrecognized request argument supplied: {min(unknown)}"
            self._send(400, {"error": {"message": message}})
        else:
            self._send(200, REPLY)

    def _send(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def plain(**features: object) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Server", (Plain,), features))
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


STRICT = {"refused": frozenset({"return_token_ids"})}


@contextmanager
def proxy_at(upstream: str, home: Path, *options: str) -> Iterator[tuple[str, str]]:
    """``bridle proxy`` as a person starts it: its URL and its banner."""
    argv = [sys.executable, "-m", "bridle", "proxy", "--engine", upstream, "--port", "0"]
    with subprocess.Popen(
        [*argv, "--store", str(home / "bridle.db"), *options],
        env={**os.environ, "BRIDLE_HOME": str(home), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        try:
            while not lines or not lines[-1].startswith("  upstream"):
                line = process.stdout.readline()
                assert line, lines
                lines.append(line)
            url = lines[1].split("OPENAI_BASE_URL=")[1].strip().removesuffix("/v1")
            yield url, "".join(lines)
        finally:
            process.send_signal(signal.SIGTERM)


def said(proxy: str) -> httpx.Response:
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return httpx.post(f"{proxy}/v1/chat/completions", json=asked, timeout=30, trust_env=False)


def test_an_upstream_without_a_health_route_keeps_its_calls(tmp_path: Path) -> None:
    store = str(tmp_path / "bridle.db")
    limits = Limits(health_check_s=0.02)
    with plain() as upstream, ProxyServer(ProxySettings(upstream, store, limits=limits)) as proxy:
        for _ in range(15):
            time.sleep(0.1)  # idle for several checks
            assert said(proxy.base_url).status_code == 200
        state = httpx.get(f"{proxy.base_url}/bridle/v1/engines", trust_env=False).json()[0]
        assert state["ejections"] == 0
    with Reader(store) as reader:
        calls = [call for session in reader.sessions() for call in reader.calls(session.id)]
        assert len(calls) == 15
        for call in calls:
            assert call.status is CallStatus.COMPLETE
            assert IDS_MISSING in [note.name for note in call.notes]


def test_missing_token_ids_are_said_at_the_start_on_the_call_and_by_the_audit(
    bridle: Bridle, tmp_path: Path
) -> None:
    with plain() as upstream, proxy_at(upstream, tmp_path) as (proxy, banner):
        assert "(gpt-x): it returns no token ids, so conversations are recorded as text" in banner
        assert "continuation off: name the model with --tokenizer" in banner
        assert said(proxy).status_code == 200
    store = ("--store", tmp_path / "bridle.db")
    audited = bridle("audit", *store)
    assert audited.exit_code == 0
    assert "Nothing was captured: the engine returned no token ids." in audited.stdout
    assert "accounted for" not in audited.stdout
    assert (
        "the engine returned no token ids: nothing to train"
        in bridle("show", "last", *store).stdout
    )


def test_an_upstream_that_refuses_unknown_fields_works_with_the_option_that_is_named(
    tmp_path: Path,
) -> None:
    with plain(**STRICT) as upstream:
        with proxy_at(upstream, tmp_path) as (proxy, banner):
            assert "Unrecognized request argument supplied: return_token_ids" in banner
            assert "start the proxy with --external" in banner
            assert said(proxy).status_code == 400
        with proxy_at(upstream, tmp_path, "--external") as (proxy, banner):
            assert "recorded as text; nothing of it can be trained" in banner
            assert "continuation off: an external API takes no token ids" in banner
            reply = said(proxy)
    assert reply.json()["choices"][0]["message"]["content"] == "Hello"


def test_a_wrong_key_and_a_silent_address_are_said(tmp_path: Path) -> None:
    with plain(key="right") as upstream:
        wrong = examine(upstream, api_key="wrong", model=None, external=False, wait_s=0)
        right = examine(upstream, api_key="right", model=None, external=False, wait_s=0)
    assert wrong.problem.startswith("it refuses the key (no valid key): set BRIDLE_UPSTREAM")
    assert right.token_ids is False
    gone = examine(upstream, api_key=None, model=None, external=False, wait_s=0)
    assert gone.problem == "nothing listens there yet: calls fail until something does"


def test_the_banner_says_that_continuation_is_exact_and_how_keys_work(
    model_dir: Path, tmp_path: Path
) -> None:
    with (
        ScriptedEngine(model_dir, lambda _: ScriptedReply("Hi")) as engine,
        proxy_at(engine.base_url, tmp_path) as (_, banner),
    ):
        assert f"continuation exact, with the tokenizer in {model_dir}" in banner
        assert "keys        recording needs none on this machine; control: " in banner
        assert "returns token ids" in banner
        assert "Bridle records to " in banner


def test_the_cause_is_logged_when_an_engine_is_ejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with plain() as upstream:
        pass
    limits = Limits(health_check_s=0.02, failures_to_eject=2)
    settings = ProxySettings(upstream, str(tmp_path / "bridle.db"), limits=limits)
    with caplog.at_level("WARNING", "bridle.proxy"), ProxyServer(settings):
        until = time.monotonic() + 20
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.05)
    ejected = caplog.records[0]
    assert ejected.message == "engine_ejected"
    assert ejected.__dict__["cause"] == "the engine cannot be reached"
