"""A real proxy between a scripted engine and a real SQLite store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.asgi import read_body
from tests.support.native_providers import SERVE, NativeProvider
from tests.support.processes import until

from bridle.engine.scripted import Script, ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.engine.serve.transport import ServerThread
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.proxy.wire.sse import SseParser
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import CallRow, Reader

MODEL = "tiny-policy"
CORPUS = [
    "The answer is four. One two three four five six seven eight nine ten.",
    'Call the tool {"name": "add", "arguments": {"a": 1, "b": 2}} and then say the sum.',
    "user assistant system tool weather in Paris is sunny and warm today.",
] * 20


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer and a chat template, and no weights."""
    directory = tmp_path_factory.mktemp("model")
    train_tokenizer(directory, CORPUS)
    return directory


@dataclass
class Stage:
    """A scripted engine whose script a test may change at any time."""

    engine: ScriptedEngine
    play: Script

    @property
    def requests(self) -> list[ScriptedRequest]:
        return self.engine.requests


@pytest.fixture
def stage(model_dir: Path) -> Iterator[Stage]:
    held: list[Stage] = []
    with ScriptedEngine(
        model_dir, lambda request: held[0].play(request), served_model_name=MODEL
    ) as engine:
        held.append(Stage(engine, lambda _: ScriptedReply("The answer is four.")))
        yield held[0]


@dataclass
class Bench:
    """A running proxy and a reader of what it records."""

    server: ProxyServer
    reader: Reader
    store_path: Path
    settings: ProxySettings = field(repr=False)

    @property
    def url(self) -> str:
        return self.server.base_url

    def calls(self) -> list[CallRow]:
        """Every recorded call, in the order of their start."""
        with contextlib.suppress(httpx.HTTPError, OSError):
            httpx.get(f"{self.url}/metrics")
        sessions = list(self.reader.sessions())
        rows = [row for session in sessions for row in self.reader.calls(session.id)]
        return sorted(rows, key=lambda row: (row.started_at, row.id))

    def judged(self) -> list[CallRow]:
        """Every recorded call, with the kinds and reasons of breaks that the record shows."""
        sessions = LoadedSession.stream(self.reader, list(self.reader.sessions()))
        rows = [row for session in sessions for row in session.calls]
        return sorted(rows, key=lambda row: (row.started_at, row.id))

    def call(self) -> CallRow:
        """The only call."""
        (row,) = self.calls()
        return row


StartProxy = Callable[..., Bench]


@pytest.fixture
def start_proxy(tmp_path: Path) -> Iterator[StartProxy]:
    """Starts proxies on one store; each keyword is a field of the settings."""
    path = tmp_path / "bridle.db"
    running: list[Bench] = []

    def start(upstream_url: str, **fields: Any) -> Bench:
        settings = ProxySettings(upstream_url=upstream_url, store_url=str(path), **fields)
        server = ProxyServer(settings, grace_s=1)
        server.start()
        bench = Bench(server, Reader(str(path)), path, settings)
        running.append(bench)
        return bench

    yield start
    for bench in running:
        bench.server.stop()
        bench.reader.close()


@pytest.fixture
def bench(stage: Stage, start_proxy: StartProxy) -> Bench:
    """A proxy with default settings in front of ``stage``."""
    return start_proxy(stage.engine.base_url)


Answer = Callable[[Any, Any], Any]
"""An ASGI coroutine function of ``(receive, send)``: what a raw engine does with a chat request."""


@dataclass
class RawEngine:
    """An HTTP server that answers chat requests with whatever bytes a test wants."""

    base_url: str
    answer: Answer
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[bytes, bytes]] = field(default_factory=list)


@pytest.fixture
def raw_engine() -> Iterator[RawEngine]:
    held: list[RawEngine] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = await read_body(receive)
        if scope["path"] == "/health":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})
            return
        held[0].bodies.append(body)
        held[0].headers.append(dict(scope["headers"]))
        await held[0].answer(receive, send)

    server = ServerThread(app, host="127.0.0.1", port=0)
    server.start()
    held.append(RawEngine(server.base_url, lambda _receive, _send: None))
    yield held[0]
    server.stop()


@pytest.fixture
def ask() -> dict[str, Any]:
    """The plainest chat request."""
    return {"model": "gpt-x", "messages": [{"role": "user", "content": "two and two?"}]}


@pytest.fixture
def events() -> Callable[[bytes], list[Any]]:
    """The JSON payloads of an event stream; ``[DONE]`` as text."""

    def read(stream: bytes) -> list[Any]:
        parser = SseParser()
        payloads = [*parser.feed(stream), *parser.finish()]
        return [p.decode() if p == b"[DONE]" else json.loads(p) for p in payloads]

    return read


@pytest.fixture(name="until")
def waits_for_a_condition() -> Callable[[Callable[[], bool]], None]:
    return until


@pytest.fixture
def provider(dialect: str) -> Iterator[NativeProvider]:
    """An upstream of a dialect, which holds to its provider's rules."""
    server = NativeProvider(SERVE[dialect]())
    server.start()
    yield server
    server.stop()
