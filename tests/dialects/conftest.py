"""Share with the dialect tests: minted ids, the fold, a stream as bytes, event sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from threading import Thread
from typing import Any

import orjson
import pytest
from hypothesis import strategies as st

from bridle.proxy.dialects.dialect import Dialect
from bridle.proxy.wire.canonical import (
    Event,
    Finished,
    Minted,
    ReasoningDelta,
    Reply,
    Request,
    Started,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from bridle.proxy.wire.fold import Fold

CALL_ID = "call_abcdefghij234567klmnopqr"
CREATED = 1_700_000_000


@pytest.fixture(autouse=True)
def replies_end_when_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ``completed_at`` of every response the same value."""
    monkeypatch.setattr("bridle.proxy.dialects.responses.stream.now", lambda: CREATED)


@pytest.fixture(scope="session")
def call_id() -> str:
    return CALL_ID


@pytest.fixture(scope="session")
def mint() -> Callable[[Dialect, Request], Minted]:
    def minted(dialect: Dialect, request: Request) -> Minted:
        return dialect.mint(CALL_ID, CREATED, request.model)

    return minted


def _fold(events: Sequence[Event]) -> Reply:
    whole = Fold()
    for event in events:
        whole.take([event])
    return whole.reply()


@pytest.fixture(scope="session")
def fold() -> Callable[[Sequence[Event]], Reply]:
    return _fold


@pytest.fixture(scope="session")
def streamed() -> Callable[..., bytes]:
    """The whole stream that a dialect writes for ``events``."""

    def stream(dialect: Dialect, request: Request, events: Sequence[Event]) -> bytes:
        emitter = dialect.emitter(request, dialect.mint(CALL_ID, CREATED, request.model))
        pieces = [emitter.begin(), *(emitter.event(event) for event in events), emitter.end()]
        return b"".join(pieces)

    return stream


class Server(ThreadingHTTPServer):
    """Answers every request with the one reply that it was last given."""

    daemon_threads = True
    reply: tuple[int, bytes, str, tuple[tuple[str, str], ...]] = (200, b"", "", ())
    received: list[tuple[str, bytes]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(
        self,
        body: bytes,
        content_type: str = "application/json",
        status: int = 200,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.reply = (status, body, content_type, headers)
        self.received = []


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        received = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.received.append((self.path, received))
        status, body, content_type, headers = self.server.reply
        self.send_response(status)
        for name, value in headers:
            if name != "content-type":
                self.send_header(name, value)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *arguments: object) -> None:
        """Quiet: the tests say what was received."""


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A provider for the official clients, whatever HTTP library they use."""
    serving = Server(("127.0.0.1", 0), _Handler)
    thread = Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield serving
    serving.shutdown()
    serving.server_close()
    thread.join()


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def _pieces(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


@st.composite
def _turns(draw: Any, names: Sequence[str] = ("look", "run")) -> list[Event]:
    """A reply as engines give it: reasoning, text and calls, each in any number of pieces."""
    cuts = st.lists(st.integers(0, 20), max_size=3)
    events: list[Event] = [Started(draw(st.none() | st.integers(1, 10**6)))]
    events += [ReasoningDelta(piece) for piece in _pieces(draw(TEXT), draw(cuts))]
    events += [TextDelta(piece) for piece in _pieces(draw(TEXT), draw(cuts))]
    calls = draw(st.integers(0, 3))
    for index in range(calls):
        name = draw(st.sampled_from(list(names)))
        arguments = orjson.dumps(draw(st.dictionaries(TEXT, JSON_VALUES, max_size=3))).decode()
        if name == "run":
            arguments = orjson.dumps({"input": draw(TEXT)}).decode()
        identifier = f"{CALL_ID}{index:02d}"
        pieces = _pieces(arguments, draw(cuts))
        events.append(ToolCallDelta(index, identifier, name, pieces[0]))
        events += [ToolCallDelta(index, arguments=piece) for piece in pieces[1:]]
    reason = draw(st.sampled_from(["length", "tool_calls" if calls else "stop"]))
    events.append(Finished(reason))
    events.append(Usage(draw(st.integers(1, 10**6)), draw(st.integers(0, 10**4)), 3, 2))
    return events


@pytest.fixture(scope="session")
def turns() -> Any:
    """Strategy: the events of one reply. ``run`` is always called with ``{"input": text}``."""
    return _turns()


@pytest.fixture(scope="session")
def json_values() -> Any:
    return JSON_VALUES


@st.composite
def _mutated(draw: Any, body: Any) -> Any:
    """``body`` with a few of its values replaced, dropped or doubled."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        places: list[tuple[Any, Any]] = []

        def walk(node: Any, places: list[tuple[Any, Any]] = places) -> None:
            keys = (
                list(node)
                if isinstance(node, dict)
                else range(len(node))
                if isinstance(node, list)
                else ()
            )
            for key in keys:
                places.append((node, key))
                walk(node[key])

        walk(body)
        if not places:
            break
        node, key = draw(st.sampled_from(places))
        action = draw(st.sampled_from(["replace", "drop", "double"]))
        if action == "replace":
            node[key] = draw(JSON_VALUES)
        elif action == "drop":
            del node[key]
        elif isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        else:
            node[draw(TEXT)] = copy.deepcopy(node[key])
    return body


@pytest.fixture(scope="session")
def mutated() -> Any:
    """Strategy maker: bodies near to a valid one."""
    return _mutated
