"""The client's side of one HTTP request, over ASGI: body in, bytes out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, MutableMapping, Sequence
from typing import Any

from bridle.errors import BridleError
from bridle.proxy.http.protocol import EXTENSION, ShortWay
from bridle.proxy.settings import Limits
from bridle.proxy.wire.canonical import ApiError, HttpError
from bridle.proxy.wire.histories import Arriving, Repeats
from bridle.proxy.wire.in_flight import STEP, Held

AsgiMessage = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]


class ClientGone(BridleError):
    """The client closed its connection before its request was complete."""


class Client:
    """One request's connection to its client."""

    __slots__ = (
        "_blocked",
        "_held",
        "_receive",
        "_send",
        "_short",
        "cancelling",
        "closed",
        "gone",
        "header_bytes",
        "headers",
        "last_write",
        "scope",
        "started",
        "task",
        "watching",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.headers: dict[str, str] = {}
        """Header values by lower-case name; the last value of a repeated header."""
        self.header_bytes = 0
        for name, value in scope["headers"]:
            self.header_bytes += len(name) + len(value)
            self.headers[name.decode("latin-1")] = value.decode("latin-1")
        self.started = False
        """True if the status line has been sent. From then on, an error can only be sent inside the
        stream."""
        self.closed = False
        self.last_write = 0.0
        """``time.monotonic()`` of the last bytes."""
        self.gone = False
        """True if the client closed its connection while it was watched
        (:mod:`bridle.proxy.http.watch`)."""
        self.task: asyncio.Task[Any] | None = None
        """The task that serves the client, while it is watched."""
        self.cancelling = 0
        """Number of requests to cancel the task that came before the client was watched."""
        self.watching: asyncio.Task[None] | None = None
        self._blocked: asyncio.Task[None] | None = None
        """The task that writes to a client that reads too slowly."""
        self._held: deque[AsgiMessage] = deque()
        self._short: ShortWay | None = None

    @property
    def address(self) -> str | None:
        client = self.scope.get("client")
        return client[0] if client else None

    async def body(self, limits: Limits, held: Held) -> bytes:
        """Return the whole request body; see :meth:`body_after`."""
        return (await self.body_after((), limits, held))[0]

    async def body_after(
        self, earlier: Sequence[bytes], limits: Limits, held: Held
    ) -> tuple[bytes, Repeats | None]:
        """Return the whole request body, and what it repeats of ``earlier`` bodies.

        Its bytes are counted in ``held``. Raise :class:`ApiError` (408, 413, 415, 503) and
        :class:`ClientGone`.
        """
        limit, headers = limits.body_bytes, self.headers
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            message = f"a body in Content-Encoding {coding} is not served: send it as it is"
            raise ApiError("invalid_request", message, status=415)
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise too_large(limit)
        event = await self._receive()
        if event["type"] == "http.request" and not event.get("more_body", False):
            body: bytes = event.get("body", b"")
            if len(body) > limit:
                raise too_large(limit)
            if len(body) > STEP:
                held.add(len(body))
            return body, None
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                return await self._rest(event, Arriving(earlier), limit, held)
        except TimeoutError:
            message = f"the request's body was not whole within {limits.body_timeout_s:g} s"
            raise ApiError("invalid_request", message, status=408) from None

    async def _rest(
        self, event: AsgiMessage, arriving: Arriving, limit: int, held: Held
    ) -> tuple[bytes, Repeats | None]:
        length = 0
        while True:
            if event["type"] == "http.disconnect":
                raise ClientGone
            if piece := event.get("body", b""):
                length += len(piece)
                if length > limit:
                    raise too_large(limit)
                held.add(len(piece))
                arriving.add(piece)
            if not event.get("more_body", False):
                return arriving.body()
            event = await self._receive()

    async def disconnected(self) -> None:
        """Cancel the task that serves the client when the client closes its connection.

        The body must have been read before.
        """
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self.task is not None:
            self.task.cancel()

    async def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: Headers = (),
    ) -> None:
        """Send a whole response at once."""
        self.started = True
        fields = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            *headers,
        ]
        short: ShortWay | None = self.scope.get("extensions", {}).get(EXTENSION)
        if short is not None and short.respond(status, fields, body):
            return
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def refuse(self, error: HttpError, headers: Headers = ()) -> None:
        fields = dict(encoded(error.headers))
        content_type = fields.pop(b"content-type", b"application/json")
        await self.respond(error.status, error.body, content_type, (*fields.items(), *headers))

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
                    *headers,
                ],
            }
        )

    def write(self, body: bytes) -> asyncio.Task[None] | None:
        """Hand ``body`` to the server at once.

        If the client reads too slowly, return the task to await before more is written; anything
        written earlier is kept in order.
        """
        self.last_write = time.monotonic()
        short = self._short
        if short is not None and body and self._blocked is None and short.write(body):
            return None
        self._push({"type": "http.response.body", "body": body, "more_body": True})
        if short is None:
            # From the second chunk on: the first need not wait for the end of the turn.
            self._short = self.scope.get("extensions", {}).get(EXTENSION)
        return self._blocked

    async def finish(self, body: bytes) -> None:
        self.closed = True
        self._push({"type": "http.response.body", "body": body, "more_body": False})
        if self._blocked is not None:
            await self._blocked

    def _push(self, message: AsgiMessage) -> None:
        """Send without a turn of the event loop, unless the server asks to wait."""
        if self._short is not None:
            self._short.flush()
        if self._blocked is not None:
            self._held.append(message)
            return
        started = _StartedSend(self._send(message))
        if not started.done:
            self._blocked = asyncio.ensure_future(self._unblock(started))

    async def _unblock(self, started: _StartedSend) -> None:
        await started
        while self._held:
            await self._send(self._held.popleft())
        self._blocked = None


class _StartedSend:
    """A send that has run up to its first wait; awaiting it runs the rest.

    An exception before the first wait is raised by the constructor.
    """

    __slots__ = ("_steps", "_waits_for", "done")

    def __init__(self, work: Awaitable[None]) -> None:
        self._steps = work.__await__()
        self.done = False
        try:
            self._waits_for = next(self._steps)
        except StopIteration:
            self.done = True

    def __await__(self) -> Generator[Any, None, None]:
        if not self.done:
            # The event loop is given what the work waits for; it has not seen it yet.
            yield self._waits_for
            yield from self._steps


def encoded(headers: Iterable[tuple[str, str]]) -> Headers:
    return tuple([(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers])


def too_large(limit: int) -> ApiError:
    return ApiError(
        "too_large", f"the request body is larger than {limit} bytes (body_bytes)", status=413
    )
