"""Every store that a test makes is audited when the test is over; calls to put into one.

A room that writes to stores of its own has a fixture ``url`` for ``writer`` and ``reader``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import functools
import gc
import importlib.util
import os
import re
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

# Many tests share the cores; PyTorch and the processes that tests start read these variables.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import certifi
import numpy as np
import pytest
from hypothesis import settings
from numpy.typing import NDArray

from bridle.reconstruct.audit import audit
from bridle.store.call import CallBegun, CallEnded
from bridle.store.reading.queries import Reader
from bridle.store.records import (
    CallStatus,
    Choice,
    Message,
    Sampler,
    SessionRecord,
    ToolCall,
    VersionRun,
    new_id,
)
from bridle.store.schema import database
from bridle.store.schema.files import make_private_folder
from bridle.store.tree import TokenTree
from bridle.store.writing.writer import Writer

AUDITED = (
    "bridle",
    "conformance",
    "dialects",
    "harnesses",
    "lineage",
    "proxy",
    "reconstruct",
    "store",
)
"""Rooms whose tests record what holds together unless they are marked ``damages_store``."""

CASES = 4
"""The cases that .ci/run takes of a test with more of them."""

WARM = Path(__file__).with_name("warm")

BEYOND_THE_RECORDER = {
    "proxy/test_served_weights.py": "torch",
    "proxy/test_memory.py": "bridle.bench",
}
"""The module that each file needs beyond the recorder's wheel (tests/pythons.py).

A file whose module is missing is not collected.
"""
collect_ignore = [
    file for file, module in BEYOND_THE_RECORDER.items() if importlib.util.find_spec(module) is None
]


def now() -> float:
    """The time as both databases keep it: PostgreSQL has microseconds."""
    return round(time.time(), 6)


AuditStore = Callable[[Path], None]
Ids = Sequence[int] | NDArray[Any]


# How long an example takes says nothing here: other jobs may share the machine.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and so would all that the tests start and end."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _selected(config: pytest.Config) -> list[str]:
    """The marks for which tests are selected with ``-m``; none in the default suite."""
    return re.findall(r"(?<!not )\b(?!not\b|and\b|or\b)\w+", config.option.markexpr)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that have none of the marks for which tests are selected with ``-m``.

    Importing every file takes longer than most of the targets' tests.
    """
    names = _selected(config)
    if not names or not collection_path.name.startswith("test_"):
        return None
    marked = re.compile(rf"mark\.({'|'.join(names)})\b")
    files = (collection_path, *(folder / "conftest.py" for folder in collection_path.parents))
    found = any(file.exists() and marked.search(file.read_text()) for file in files)
    return None if found else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep each nth case of a test that is marked ``sampled(n)``, if ``BRIDLE_SAMPLE`` is set.

    Of every other test of the default suite, about ``CASES`` are kept, spread over all. The first
    case is always kept, but ``sampled(0)`` leaves a test out.
    """
    if not os.environ.get("BRIDLE_SAMPLE"):
        return
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept: set[pytest.Item] = set()
    for given in cases.values():
        mark = given[0].get_closest_marker("sampled")
        each = mark.args[0] if mark else 1 if _selected(config) else -(-len(given) // CASES)
        kept.update(given[::each] if each else ())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep imported modules and collected tests away from the garbage collector.

    They are half a million objects that stay, and a sixth of the time that collecting tests takes.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


class _QuickAsyncio:
    """``asyncio`` for uvicorn, which looks every tenth of a second whether it is to end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))


@pytest.fixture(scope="session", autouse=True)
def servers_end_soon() -> Iterator[None]:
    """More than a thousand of them do in a run of the suite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", _QuickAsyncio())
        yield


@pytest.fixture(scope="session", autouse=True)
def clients_share_certificates() -> Iterator[None]:
    """Read the public authorities' certificates once a process.

    Each of httpx's clients reads them, which takes 35 ms, and no test goes to a public address.
    """
    separate = ssl.create_default_context
    shared = functools.cache(separate)

    def create(*purpose: Any, **sources: Any) -> ssl.SSLContext:
        public = sources == {"cafile": certifi.where()}
        return (shared if public else separate)(*purpose, **sources)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", create)
        yield


MakeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder that the workers of a run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture(scope="session")
def make_once(run_folder: Path) -> MakeOnce:
    """Make a folder by its name in the first worker that asks for it; the others wait for it."""

    def made(name: str, make: Callable[[Path], object]) -> Path:
        place, partial = run_folder / name, run_folder / f"{name}.partial"
        with (run_folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                shutil.rmtree(partial, ignore_errors=True)
                make(partial)
                partial.rename(place)
        return place

    return made


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite store of the newest schema with nothing in it."""
    path = tmp_path_factory.mktemp("empty") / "empty.db"
    database.migrate(str(path))
    return path


@pytest.fixture(autouse=True)
def new_stores_are_copies(empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy ``empty_store`` where a new SQLite store is made: a sixth of the work.

    Processes that tests start make their own, and so do the tests of making one.
    """

    def make(path: Path) -> None:
        if path.exists():
            return
        make_private_folder(path.parent)
        copy = path.with_name(f"{path.name}.{new_id('copy')}")
        shutil.copyfile(empty_store, copy)
        copy.chmod(0o600)
        with suppress(FileExistsError):
            path.hardlink_to(copy)
        copy.unlink()

    monkeypatch.setattr(database, "make_private_file", make)


@pytest.fixture(scope="session")
def audit_store() -> AuditStore:
    """Audits one SQLite store, bodies included: for fixtures that keep theirs for many tests."""
    return _audit


@pytest.fixture(autouse=True)
def stores_are_audited(request: pytest.FixtureRequest) -> Iterator[None]:
    """Audits every SQLite store under the test's ``tmp_path``, and its PostgreSQL one (``url``)."""
    room = Path(request.path).parent.name
    if room not in AUDITED or "tmp_path" not in request.fixturenames:
        yield
        return
    folder: Path = request.getfixturevalue("tmp_path")
    # Asked for now, so that whatever writes to it is closed before it is audited.
    on_server = request.node.get_closest_marker("postgres") and "url" in request.fixturenames
    url = request.getfixturevalue("url") if on_server else None
    yield
    if request.node.get_closest_marker("damages_store") is not None:
        return
    for path in folder.rglob("*.db"):
        if _is_store(path):
            _audit(path)
    if url is not None and database.revision(url) is not None:
        _audit(url)


def _audit(store: Path | str) -> None:
    with Reader(str(store)) as reader:
        violations = [v for found in audit(reader, bodies=True) for v in found.violations]
        assert not violations, f"{store} does not hold together: {violations[:5]}"


def _is_store(path: Path) -> bool:
    """Return whether it is a database with our tables; some tests make files that are not."""
    with closing(sqlite3.connect(path)) as connection:
        try:
            tables = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'spans'")
            return tables.fetchone() is not None
        except sqlite3.DatabaseError:
            return False


@pytest.fixture(scope="session")
def warm_python(run_folder: Path) -> Iterator[str]:
    """A stand-in for ``sys.executable`` under which ``-m bridle`` starts in milliseconds.

    It forks a process that has imported torch and all of ours: see ``tests/warm``. The workers of
    a run share the process. The first to need it starts it, and it ends with the last.
    """
    client = run_folder / "warm" / "python"
    with socket.socket(socket.AF_UNIX) as user:
        with (run_folder / "warm.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                user.connect(str(client.with_name("socket")))
            except OSError:
                shutil.rmtree(client.parent, ignore_errors=True)
                _start_warm_process(client)
                user.connect(str(client.with_name("socket")))
        user.sendall(bytes(4))
        yield str(client)


def _start_warm_process(client: Path) -> None:
    client.parent.mkdir()
    address = client.with_name("socket")
    script = (WARM / "client.py").read_text()
    filled = script.replace("@PYTHON@", sys.executable).replace("@ADDRESS@", str(address))
    client.write_text(f"#!{sys.executable} -IS\n{filled}")
    client.chmod(0o755)
    command = [sys.executable, str(WARM / "server.py"), str(address), str(client)]
    threads = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=os.environ | threads
    )
    assert server.stdout is not None
    with server.stdout as said:
        assert said.readline() == b"ready\n"


@pytest.fixture
def warm_start(warm_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the warm process for commands that the test starts as ``sys.executable -m bridle``.

    The commands that they start are forks too.
    """
    monkeypatch.setattr(sys, "executable", warm_python)


class Calls:
    """Makes the records of calls that are complete and agree with themselves."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def session(self, **fields: Any) -> SessionRecord:
        return SessionRecord(**{"id": new_id("session"), "created_at": now(), **fields})

    def begun(self, session: SessionRecord | str, **fields: Any) -> CallBegun:
        values: dict[str, Any] = {
            "id": new_id("call"),
            "session_id": session if isinstance(session, str) else session.id,
            "dialect": "chat",
            "started_at": now(),
            "request_body": b'{"model":"policy","messages":[]}',
            "stream": True,
            "model_requested": "policy",
        }
        return CallBegun(**values | fields)

    def choice(self, ids: Ids, version: int = 1, finish_reason: str = "stop") -> Choice:
        return Choice(
            token_ids=np.asarray(ids, dtype=np.uint32),
            logprobs=-self.random.random(len(ids)).astype(np.float32),
            versions=(VersionRun(0, version),) if len(ids) else (),
            finish_reason=finish_reason,
        )

    def ended(
        self,
        begun: CallBegun,
        prompt: Ids,
        *sampled: Ids,
        version: int = 1,
        tree: TokenTree | None = None,
        **fields: Any,
    ) -> CallEnded:
        """``tree`` is its session's, in which it is placed; without one it is stored whole."""
        choices = tuple(self.choice(ids, version) for ids in sampled)
        values: dict[str, Any] = {
            "id": begun.id,
            "session_id": begun.session_id,
            "status": CallStatus.COMPLETE,
            "ended_at": now(),
            "prompt_token_ids": np.asarray(prompt, dtype=np.uint32),
            "choices": choices,
            "response_body": f"data: {begun.id}\n\n".encode(),
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": sum(len(choice.token_ids) for choice in choices),
            },
            "replies": (Message("assistant", "yes"),),
            "sampler": Sampler("processed"),
        }
        ended = CallEnded(**values | fields)
        if tree is None:
            return ended
        growth = tree.grow(ended.id, ended.prompt_token_ids, ended.choices)
        return dataclasses.replace(ended, growth=growth)

    @staticmethod
    def message(chat: Mapping[str, Any]) -> Message:
        """A message from its chat shape."""
        plain = {name: value for name, value in chat.items() if name != "tool_calls"}
        called = (
            ToolCall(call.get("id", ""), **call["function"])
            for call in chat.get("tool_calls") or ()
        )
        return Message(**{"role": "assistant", **plain}, tool_calls=tuple(called))


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def writer(url: str) -> Iterator[Writer]:
    with Writer(url) as opened:
        yield opened


@pytest.fixture
def reader(url: str) -> Iterator[Reader]:
    with Reader(url) as opened:
        yield opened


@pytest.fixture(scope="session", autouse=True)
def own_data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Proxies that tests start keep their admin key and their store away from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRIDLE_HOME", str(tmp_path_factory.mktemp("home")))
        yield
