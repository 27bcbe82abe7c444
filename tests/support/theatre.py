"""The proxy's application in this process, in front of scripted upstreams and without a socket.

Thousands of replies take seconds. Each request has a name of its own in its prompt, by which the
transport finds the reply that it is to get.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bridle.proxy.app import App
from bridle.proxy.engines.engine import PooledEngine
from bridle.proxy.engines.transport import ConnectionBroke, Follower
from bridle.proxy.settings import ProxySettings
from bridle.store.reading.queries import Reader

NAME = re.compile(rb"[0-9a-f]{32}")


@dataclass
class Sent:
    """The bytes that an upstream sends, read by read."""

    pieces: Iterable[bytes]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    """True if the connection breaks after the last read."""


class Received(NamedTuple):
    """A reply as the client gets it."""

    status: int
    body: bytes
    call_id: str


class Response:
    """An upstream's response, as the proxy's transport gives it."""

    def __init__(self, sent: Sent) -> None:
        self.status, self.headers = sent.status, sent.headers
        self._sent, self._left = sent, False

    async def read(self) -> bytes:
        body = bytearray()
        await self.follow(body.extend)
        return bytes(body)

    async def follow(self, follower: Follower) -> None:
        for piece in self._sent.pieces:
            await asyncio.sleep(0)
            if self._left:
                return
            if (waiting := follower(piece)) is not None:
                await waiting
        if self._sent.cut and not self._left:
            raise ConnectionBroke("the engine ended the connection")

    def close(self) -> None:
        pass

    def leave(self) -> None:
        self._left = True


class Transport:
    """Replies to each request with the bytes that its prompt names."""

    connection_epoch = 0
    any_open = True

    def __init__(self) -> None:
        self.replies: dict[str, Sent] = {}

    async def request(self, method: str, path: str, body: bytes = b"", **_: Any) -> Response:
        del method, path
        match = NAME.search(body)
        assert match
        return Response(self.replies.pop(match[0].decode()))

    async def close(self) -> None:
        pass


class Theatre:
    """The proxy's application in a loop of its own."""

    def __init__(self, settings: ProxySettings, models: Iterable[str] = ("m",)) -> None:
        """Start the proxy. ``models`` are the names of the models whose upstreams are scripted."""
        self.app = App(settings)
        self.transport = Transport()
        self.runner = asyncio.Runner()
        self._stop = asyncio.Event()
        self.engines: list[PooledEngine] = self.runner.run(self._start(models))
        self.reader = Reader(settings.store_url)

    async def _start(self, models: Iterable[str]) -> list[PooledEngine]:
        started, self._stop = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, str]:
            if not started.is_set():
                return {"type": "lifespan.startup"}
            await self._stop.wait()
            return {"type": "lifespan.shutdown"}

        async def send(message: Any) -> None:
            assert "failed" not in message["type"], message
            started.set()

        self._life = asyncio.create_task(self.app({"type": "lifespan"}, receive, send))
        await started.wait()
        assert self.app.services
        find = self.app.services.models.find
        pools = [find(model, None) for model in models]
        engines = [one for pool in pools for one in pool._engines.values()]
        for engine in engines:
            engine.transport = self.transport  # type: ignore[assignment]
        return engines

    def close(self) -> None:
        async def stop() -> None:
            self._stop.set()
            await self._life

        self.runner.run(stop())
        self.runner.close()
        self.reader.close()

    def name(self, sent: Sent) -> str:
        """Return a name to put into a prompt, whose request gets ``sent``."""
        name = uuid.uuid4().hex
        self.transport.replies[name] = sent
        return name

    async def post(
        self, name: str, path: str, body: Mapping[str, Any], query: bytes = b""
    ) -> Received:
        """Send a request of a session that is called ``name``, and wait for its whole reply."""
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        received: list[Any] = []

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            received.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/s/{name}{path}",
            "query_string": query,
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 1),
        }
        await self.app(scope, receive, send)
        headers = dict(received[0]["headers"])
        text = b"".join(message.get("body", b"") for message in received)
        return Received(received[0]["status"], text, headers[b"x-request-id"].decode())
