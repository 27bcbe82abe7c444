"""The client's side of one HTTP request, over ASGI: body in, bytes out, and whether it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from proxy.canonical import ApiError, HttpError

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
Headers = tuple[tuple[str, str], ...]


class ClientGone(Exception):
    """The client closed its connection before its reply was complete."""


class Client:
    """One request's connection to its client."""

    __slots__ = (
        "_headers",
        "_receive",
        "_send",
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
    def address(self) -> str | None:
        client = self.scope.get("client")
        return client[0] if client else None

    async def body(self, limit: int) -> bytes:
        """The whole request body. Raises :class:`ApiError` (413) and :class:`ClientGone`."""
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

    @asynccontextmanager
    async def present(self) -> AsyncIterator[None]:
        """Runs the block while the client is there; else cuts it with :class:`ClientGone`.

        The body must have been read before.
        """
        scope = asyncio.timeout(None)
        inside = True

        def on_disconnect(done: asyncio.Future[None]) -> None:
            if inside and not done.cancelled():
                scope.reschedule(0)

        watch = asyncio.ensure_future(self._disconnected())
        try:
            async with scope:
                watch.add_done_callback(on_disconnect)
                try:
                    yield
                finally:
                    inside = False
        except TimeoutError:
            if scope.expired():
                raise ClientGone from None
            raise
        finally:
            watch.cancel()

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: Headers = (),
    ) -> None:
        """A whole response at once."""
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"content-type", content_type.encode("latin-1")),
                    (b"content-length", b"%d" % len(body)),
                    *encoded(headers),
                ],
            }
        )
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def refuse(self, error: HttpError, headers: Headers = ()) -> None:
        others = tuple(header for header in error.headers if header[0] != "content-type")
        content_type = dict(error.headers).get("content-type", "application/json")
        await self.respond(error.status, error.body, content_type, others + headers)

    async def start_stream(self, content_type: str, headers: Headers = ()) -> None:
        self.started = True
        await self._send(
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
        self.last_write = asyncio.get_running_loop().time()

    async def write(self, body: bytes) -> None:
        self.touch()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def finish(self, body: bytes) -> None:
        self.closed = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def too_large(limit: int) -> ApiError:
    return ApiError("too_large", f"the request body is larger than {limit} bytes", status=413)
