"""A real proxy between a scripted engine and a real SQLite store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.scripted import Reply, Script, ScriptedEngine, ScriptedRequest
from proxy.server import ProxyServer
from proxy.settings import ProxySettings
from store.queries import CallRow, Reader
from trainer.tiny import train_tokenizer

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
        held.append(Stage(engine, lambda _: Reply("The answer is four.")))
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
        sessions = list(self.reader.sessions())
        rows = [row for session in sessions for row in self.reader.calls(session.id)]
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
        server = ProxyServer(settings)
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
