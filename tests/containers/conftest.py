"""A real proxy before a scripted engine, and real containers (tests/containers/setup)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from bridle.bench.shell_policy import train_bench_tokenizer
from bridle.engine.scripted import ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.store.reading.queries import Reader

Script = Callable[[ScriptedRequest], ScriptedReply]


@dataclass(frozen=True)
class Bench:
    """A real proxy in front of a scripted engine."""

    url: str
    reader: Reader
    engine_url: str
    stop: Callable[[], None]
    """Ends the proxy."""


Stage = Callable[[Script], Bench]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    train_bench_tokenizer(directory)
    return directory


@pytest.fixture
def stage(model: Path, tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:

        def start(script: Script) -> Bench:
            engine = stack.enter_context(ScriptedEngine(model, script, max_model_len=1_000_000))
            store = str(tmp_path / "bridle.db")
            settings = ProxySettings(engine.base_url, store, tokenizer_dir=model)
            proxy = ExitStack()
            stack.callback(proxy.close)
            server = proxy.enter_context(ProxyServer(settings))
            reader = stack.enter_context(Reader(store))
            return Bench(server.base_url, reader, engine.base_url, proxy.close)

        yield start


def left_behind(program: str = "docker") -> list[str]:
    """Containers that Bridle has made and that are still there, running or not."""
    command = [program, "ps", "-a", "--filter", "label=bridle.owner", "--format", "{{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No container stays, and no folder of sockets."""
    before = set(Path("/tmp").glob("bridle-sandboxes-*"))  # noqa: S108 - where the sockets are
    yield
    assert left_behind() == []
    assert set(Path("/tmp").glob("bridle-sandboxes-*")) <= before  # noqa: S108
