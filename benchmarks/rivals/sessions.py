"""A load of agents: each sends its whole history with every call, and reads the reply's stream.

``python -m bridle.bench.rivals.sessions`` reads one :class:`SessionLoad` as JSON from standard
input and prints one :class:`SessionTimes`. A worker leads one session after the other. All begin
with the same texts, as agents of one harness do, and the first request ends with the session's
name. After every reply, the reply and a piece of source code (what a tool returned) join the
history.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httptools
import orjson
import uvloop

from bridle.bench.load import percentiles


@dataclass(frozen=True)
class SessionLoad:
    """The sessions to lead, and their target."""

    url: str
    """The base URL with ``/v1``; it may contain ``{session}``."""
    model: str
    name: str
    """The prefix of session names, which are ``{name}-{worker}-{number}``."""
    concurrency: int
    sessions: int
    """Number of sessions per worker."""
    turns: int
    opening: int
    """Characters of the first request."""
    growth: int
    """Characters that a tool's result adds in each turn."""
    api_key: str = "bench"
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of each request."""


@dataclass
class SessionTimes:
    """The result of a load."""

    calls: int = 0
    failed: int = 0
    seconds: float = 0.0
    first_ms: tuple[float, float] = (0.0, 0.0)
    """Milliseconds to the first event: 50th and 99th percentile."""
    between_ms: tuple[float, float] = (0.0, 0.0)
    """Between the arrivals of events: 50th and 99th percentile."""
    body_kb: tuple[float, float] = (0.0, 0.0)
    """Thousands of bytes of a request: 50th and 99th percentile."""
    sampled: int = 0
    """Number of events with text, which is about that of sampled tokens."""
    error: str = ""
    """The first reply that was no success, if there was one."""


_DATA: Final = b"data: "


class _Worker(asyncio.Protocol):
    """One connection, which leads one session after the other."""

    def __init__(self, load: SessionLoad, number: int, texts: list[str], times: _Times) -> None:
        self._load = load
        self._number = number
        self._opening = "".join(texts)[: load.opening]
        self._texts = cycle(texts[number:] + texts[:number])
        self._times = times
        self._url = urlsplit(load.url)
        self._session = self._turn = 0
        self._history: list[bytes] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._times.fail(f"the connection was closed: {exc}", self._left())
            self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        self._arrived.append(time.perf_counter())

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        if self._parser.get_status_code() != 200 or b"[DONE]" not in body[-64:]:
            self._times.fail(f"{self._parser.get_status_code()}: {body[-500:]!r}", self._left())
            self.done.set_result(None)
            self._transport.close()
            return
        pieces = _pieces(body)
        self._times.take(self._started, self._arrived, len(self._sent), len(pieces))
        self._add({"role": "assistant", "content": "".join(pieces)})
        self._add({"role": "user", "content": text_of(self._texts, self._load.growth)})
        self._turn += 1
        if self._turn == self._load.turns:
            self._session, self._turn, self._history = self._session + 1, 0, []
        if self._session < self._load.sessions:
            self._ask()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _left(self) -> int:
        load = self._load
        return (load.sessions - self._session) * load.turns - self._turn

    def _add(self, message: dict[str, Any]) -> None:
        self._history.append(orjson.dumps(message))

    def _ask(self) -> None:
        load = self._load
        session = f"{load.name}-{self._number}-{self._session}"
        if not self._history:
            self._add({"role": "system", "content": "You are a careful engineer."})
            self._add({"role": "user", "content": f"{self._opening}\nSession {session}."})
        fields = orjson.dumps({"model": load.model, "stream": True, **load.fields})
        self._sent = b'%b,"messages":[%b]}' % (fields[:-1], b",".join(self._history))
        path = f"{self._url.path.replace('{session}', session)}/chat/completions"
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._url.netloc}\r\n"
            f"authorization: Bearer {load.api_key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(self._sent)}\r\n\r\n"
        )
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._arrived: list[float] = []
        self._started = time.perf_counter()
        self._transport.write(head.encode() + self._sent)


class _Times:
    """The measured times in seconds."""

    def __init__(self) -> None:
        self.failed = self.sampled = 0
        self.error = ""
        self.first: list[float] = []
        self.between: list[float] = []
        self.megabytes: list[float] = []
        """Request sizes in megabytes; :func:`percentiles` multiplies by one thousand."""

    def take(self, started: float, arrived: list[float], size: int, sampled: int) -> None:
        self.first.append(arrived[0] - started)
        self.between += [later - earlier for earlier, later in pairwise(arrived)]
        self.megabytes.append(size / 1e6)
        self.sampled += sampled

    def fail(self, error: str, calls: int) -> None:
        """Count a call that failed, and the ``calls`` of its worker that it prevents."""
        self.failed += calls
        self.error = self.error or error


def _pieces(body: bytes) -> list[str]:
    """Return the pieces of text in a stream of events."""
    pieces = []
    for line in body.split(b"\n"):
        if line.startswith(_DATA) and b"[DONE]" not in line:
            for choice in orjson.loads(line[len(_DATA) :]).get("choices", ()):
                pieces += [text] if (text := choice["delta"].get("content")) else []
    return pieces


def source_texts(size: int = 2000) -> list[str]:
    """Return pieces of the standard library's source code, as tools print them."""
    folder = Path(json.__file__).parents[1]
    source = "".join(path.read_text("utf-8") for path in sorted(folder.glob("*.py")))
    return [source[at : at + size] for at in range(0, len(source) - size, size)]


def text_of(texts: Iterator[str], size: int) -> str:
    """Return the next ``size`` characters of ``texts``, without the rest of the last one."""
    text = ""
    while len(text) < size:
        text += next(texts)
    return text[:size]


def _same(worker: _Worker) -> _Worker:
    return worker


async def run(load: SessionLoad) -> SessionTimes:
    times, texts, loop = _Times(), source_texts(), asyncio.get_running_loop()
    url = urlsplit(load.url)
    workers = [_Worker(load, number, texts, times) for number in range(load.concurrency)]
    started = time.perf_counter()
    for worker in workers:
        await loop.create_connection(partial(_same, worker), url.hostname or "", url.port or 80)
    await asyncio.gather(*(worker.done for worker in workers))
    return SessionTimes(
        calls=len(times.first),
        failed=times.failed,
        seconds=time.perf_counter() - started,
        first_ms=percentiles(times.first),
        between_ms=percentiles(times.between),
        body_kb=percentiles(times.megabytes),
        sampled=times.sampled,
        error=times.error,
    )


def main() -> None:
    load = SessionLoad(**orjson.loads(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(orjson.dumps(uvloop.run(run(load))))


if __name__ == "__main__":
    main()
