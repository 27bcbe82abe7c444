"""A load generator: a number of connections that send one request after another.

A connection sends its next request as soon as the last one is answered.

``python -m bridle.bench.load`` reads one :class:`Load` as JSON from standard input and prints one
:class:`Measured`. Each worker starts a new session after ``SESSION_CALLS`` calls, as rollouts do.
``{session}`` in the URL's path is replaced by the session's name, for proxies that take it from
there. The last message of every request is unique; the messages before it are the session's.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import httptools
import orjson
import uvloop

SESSION_CALLS: Final = 32


@dataclass(frozen=True)
class Load:
    """The requests to make, and their target."""

    url: str
    """The base URL with ``/v1``; it may contain ``{session}``."""
    model: str
    concurrency: int
    request_bytes: int
    name: str
    """The prefix of session names, which are ``{name}-{worker}-{number}``."""
    seconds: float = 0.0
    """Seconds in which new requests are made; those still running at the end are awaited."""
    calls: int = 0
    """Number of requests per worker, if ``seconds`` is 0."""
    stream: bool = False
    ramp_s: float = 0.0
    """Seconds over which the starts of the workers are evenly spread; with 0 all start at once."""
    api_key: str = "bench"
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of each request."""


@dataclass
class Measured:
    """The result of a load."""

    calls: int = 0
    failed: int = 0
    seconds: float = 0.0
    first: tuple[float, float] = (0.0, 0.0)
    """Milliseconds to the first byte of the body: 50th and 99th percentile."""
    whole: tuple[float, float] = (0.0, 0.0)
    """Milliseconds to the last byte: 50th and 99th percentile."""


class Times:
    """The measured times in seconds, one value per answered request."""

    def __init__(self) -> None:
        self.failed = 0
        self.first: list[float] = []
        self.whole: list[float] = []


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the 50th and 99th percentile in milliseconds (nearest rank).

    They are zeros if there are no values.
    """
    ordered = sorted(seconds) or [0.0]

    def rank(share: float) -> float:
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return rank(0.50), rank(0.99)


class Worker(asyncio.Protocol):
    """One connection and its requests."""

    def __init__(self, load: Load, number: int, result: Times) -> None:
        self._load = load
        self._number = number
        self._result = result
        self._asked = 0
        self._started = self._first = 0.0
        self._tail = b""
        self._url = urlsplit(load.url)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._until = time.perf_counter() + load.seconds
        self._tail = b""
        self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        delay = self._load.ramp_s * self._number / self._load.concurrency
        asyncio.get_running_loop().call_later(delay, self._ask)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._result.failed += 1
            self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._load.stream:
            self._tail = self._tail[-32:] + data[-32:]
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        if not self._first:
            self._first = time.perf_counter()

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        whole = not self._load.stream or b"[DONE]" in self._tail
        if self._parser.get_status_code() == 200 and whole:
            self._result.first.append(self._first - self._started)
            self._result.whole.append(now - self._started)
        else:
            self._result.failed += 1
        more = now < self._until if self._load.seconds else self._asked < self._load.calls
        if more:
            self._ask()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _ask(self) -> None:
        load = self._load
        session = f"{load.name}-{self._number}-{self._asked // SESSION_CALLS}"
        body = request_body(load, session, self._asked)
        self._asked += 1
        path = f"{self._url.path.replace('{session}', session)}/chat/completions"
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._url.netloc}\r\n"
            f"authorization: Bearer {load.api_key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._parser = httptools.HttpResponseParser(self)
        self._first, self._tail = 0.0, b""
        self._started = time.perf_counter()
        self._transport.write(head.encode() + body)


def request_body(load: Load, session: str, number: int) -> bytes:
    """Return the body of a request of about ``request_bytes``.

    It is the session's history, then a new question.
    """
    turns = max(1, load.request_bytes // 8192)
    filler = "The quick brown fox jumps over the lazy dog. " * (load.request_bytes // turns // 45)
    messages = [{"role": "system", "content": f"Session {session}. {filler}"}]
    messages += [{"role": "user", "content": f"{turn} {filler}"} for turn in range(1, turns)]
    messages.append({"role": "user", "content": f"Question {number}?"})
    asked: dict[str, Any] = {"model": load.model, "messages": messages}
    if load.stream:
        asked["stream"] = True
    asked |= load.fields
    return orjson.dumps(asked)


def _itself(worker: Worker) -> Worker:
    return worker


async def run(load: Load) -> Measured:
    result = Times()
    loop = asyncio.get_running_loop()
    url = urlsplit(load.url)
    started = time.perf_counter()
    workers = [Worker(load, number, result) for number in range(load.concurrency)]
    host, port = url.hostname or "127.0.0.1", url.port or 80
    for worker in workers:
        await loop.create_connection(partial(_itself, worker), host, port)
    await asyncio.gather(*(worker.done for worker in workers))
    return Measured(
        calls=len(result.whole),
        failed=result.failed,
        seconds=time.perf_counter() - started,
        first=percentiles(result.first),
        whole=percentiles(result.whole),
    )


def main() -> None:
    load = Load(**orjson.loads(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(orjson.dumps(uvloop.run(run(load))))


if __name__ == "__main__":
    main()
