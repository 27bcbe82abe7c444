"""The client's side of one HTTP request, over ASGI: body in, bytes out, and whether it is there."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from bridle.proxy.http.presence import AsgiMessage, ClientGone, Presence, Receive, Watch
from bridle.proxy.http.protocol import EXTENSION, ShortWay
from bridle.proxy.http.started import Started
from bridle.proxy.wire.canonical import ApiError, HttpError

Scope = MutableMapping[str, Any]
Send = Callable[[AsgiMessage], Awaitable[None]]
Headers = tuple[tuple[str, str], ...]


class Client:
    """One request's connection to its client."""

    __slots__ = (
        "_blocked",
        "_headers",
        "_held",
        "_receive",
        "_send",
        "_short",
        "closed",
        "last_write",
        "scope",
        "started",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._headers: dict[str, str] | None = None
        self.started = False
        """The status line has left: an error can only be told inside the stream from now on."""
        self.closed = False
        self.last_write = 0.0
        self._blocked: asyncio.Task[None] | None = None
        """Writes to a client that reads too slowly."""
        self._held: deque[AsgiMessage] = deque()
        self._short: ShortWay | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Lower-case names; of repeated headers the last."""
        if self._headers is None:
            self._headers = {
                name.decode("latin-1"): value.decode("latin-1")
                for name, value in self.scope["headers"]
            }
        return self._headers

    @property
    def header_bytes(self) -> int:
        return sum([len(name) + len(value) for name, value in self.scope["headers"]])

    @property
    def address(self) -> str | None:
        client = self.scope.get("client")
        return client[0] if client else None

    async def body(self, limit: int) -> bytes:
        """The whole request body. Raises :class:`ApiError` (413, 415) and :class:`ClientGone`."""
        if (coding := self.headers.get("content-encoding", "identity")) != "identity":
            told = f"a body in Content-Encoding {coding} is not served: send it as it is"
            raise ApiError("invalid_request", told, status=415)
        declared = self.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise too_large(limit)
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise too_large(limit)
            if piece:
                pieces.append(piece)
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def present(self, watch: Watch) -> Presence:
        """``async with``: runs the block while the client is there; else cuts it with
        :class:`ClientGone`. The body must have been read before."""
        return Presence(watch, self._receive)

    async def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: Headers = (),
    ) -> None:
        """A whole response at once."""
        self.started = True
        fields = [
            (b"content-type", content_type.encode("latin-1")),
            (b"content-length", b"%d" % len(body)),
            *encoded(headers),
        ]
        short = self._short_way()
        if short is not None and short.respond(status, fields, body):
            return
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def refuse(self, error: HttpError, headers: Headers = ()) -> None:
        others = tuple(header for header in error.headers if header[0] != "content-type")
        content_type = dict(error.headers).get("content-type", "application/json")
        await self.respond(error.status, error.body, content_type, others + headers)

    def start_stream(self, content_type: str, headers: Headers = ()) -> None:
        self.started = True
        self._push(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", content_type.encode("latin-1")),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                    *encoded(headers),
                ],
            }
        )

    def touch(self) -> None:
        """Counts as written now."""
        self.last_write = time.monotonic()

    def write(self, body: bytes) -> asyncio.Task[None] | None:
        """Hands ``body`` to the server at once; when the client reads too slowly, returns what to
        wait for before more is written (more is kept meanwhile, in its order)."""
        self.last_write = time.monotonic()
        short = self._short
        if short is not None and body and self._blocked is None and short.write(body):
            return None
        self._push({"type": "http.response.body", "body": body, "more_body": True})
        if short is None:
            # From the second chunk on: the first need not wait for the end of the turn.
            self._short = self._short_way()
        return self._blocked

    async def finish(self, body: bytes) -> None:
        self.closed = True
        self._push({"type": "http.response.body", "body": body, "more_body": False})
        if self._blocked is not None:
            await self._blocked

    def _short_way(self) -> ShortWay | None:
        way: ShortWay | None = self.scope.get("extensions", {}).get(EXTENSION)
        return way

    def _push(self, message: AsgiMessage) -> None:
        """Sends without a turn of the event loop, unless the server says to wait."""
        if self._short is not None:
            self._short.flush()
        if self._blocked is not None:
            self._held.append(message)
            return
        sending = self._send(message)
        started = Started(sending)
        if not started.done:
            self._blocked = asyncio.ensure_future(self._unblock(started))

    async def _unblock(self, started: Started) -> None:
        await started
        while self._held:
            await self._send(self._held.popleft())
        self._blocked = None


def encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def too_large(limit: int) -> ApiError:
    return ApiError("too_large", f"the request body is larger than {limit} bytes", status=413)
