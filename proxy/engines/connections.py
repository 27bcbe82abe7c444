"""A small HTTP/1.1 client for one engine, with pooled connections on httptools.

A general client also handles redirects, cookies and encodings, and has a stream reader that wakes
tasks of its own, which costs a recording proxy more than recording does. Here the bytes of one
network read go straight to the follower of the response, in the loop's own callback and all at
once. A large read is fed in slices, one in each turn of the event loop, and no more is read
meanwhile: libuv would read a busy socket up to 32 times before it looks at any other. The interface
is :mod:`bridle.proxy.engines.transport`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from functools import partial
from typing import Any, Final

import httptools

from bridle.proxy.engines.transport import (
    Answer,
    ConnectionBroke,
    ConnectionEpochOver,
    ConnectionFailed,
    EngineAddress,
    Follower,
)

_HEADER_BYTES: Final = 64 * 1024
_IDLE_S: Final = 3.0
"""Seconds until an idle connection is closed. Together with the second between two checks, this is
shorter than uvicorn's 5 s, so that connections are closed here before the engine closes them."""

_SLICE_BYTES: Final = 16 * 1024
"""Maximum bytes that are fed in one turn of the event loop, some 200 events of a stream."""


class PooledResponse:
    """One response from its status line on."""

    __slots__ = (
        "_connection",
        "_end",
        "_failure",
        "_follower",
        "_left",
        "_pieces",
        "_whole",
        "head",
        "headers",
        "status",
    )

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """The response's headers, with lower-case names."""
        self.head: asyncio.Future[None] = connection.loop.create_future()
        """A future that is done when the status and the headers have arrived."""
        self._connection: _Connection | None = connection
        self._pieces: list[bytes] = []
        self._follower: Follower | None = None
        self._whole = self._left = False
        self._failure: Exception | None = None
        self._end: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """See :meth:`bridle.proxy.engines.transport.EngineResponse.read`."""
        answer = Answer()
        await self.follow(answer.take)
        return answer.body

    async def follow(self, follower: Follower) -> None:
        """Pass the body to ``follower``, read by read, and return when it is whole.

        Raises :class:`ConnectionBroke`, ``TimeoutError``, and any exception that ``follower``
        raises.
        """
        self._follower = follower
        pieces, self._pieces = self._pieces, []
        try:
            if pieces:
                self._hand_over(follower, pieces)
            await self._ended()
        finally:
            self._follower = None

    def close(self) -> None:
        """End the connection unless the response is whole; the engine then stops generating."""
        self._follower = None
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None

    def leave(self) -> None:
        """Stop following the response. Its rest is read and dropped if it comes soon, and the
        connection stays for the next request."""
        if self._connection is not None:
            self._connection.hurry()
        self._follower, self._left = None, True
        self._wake()

    async def _ended(self) -> None:
        if not self._whole and not self._left and self._failure is None:
            assert self._connection is not None, "the response was closed"  # noqa: S101
            self._end = self._connection.loop.create_future()
            await self._end
        if self._failure is not None:
            raise self._failure

    # -- from the connection ---------------------------------------------------------------------

    def arrived(self, pieces: list[bytes], *, whole: bool) -> None:
        """Take the pieces of the body that one read brought; ``whole`` is true if they end it."""
        if whole:
            self._whole = True
            self._connection = None
        if self._left:
            return
        if self._follower is not None:
            if pieces:
                self._hand_over(self._follower, pieces)
        elif self._pieces:
            self._pieces += pieces
        else:
            self._pieces = pieces
        if whole and self._end is not None:
            self._wake()

    def failed(self, error: Exception) -> None:
        if self._failure is None and not self._whole and not self._left:
            self._failure = error
            self._connection = None
            if not self.head.done():
                self.head.set_exception(error)
            self._wake()

    def _hand_over(self, follower: Follower, pieces: list[bytes]) -> None:
        try:
            waiting = follower(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        except Exception as error:  # noqa: BLE001 - raised again where the response is awaited
            self._failure = error
            self.close()
            self._wake()
            return
        if waiting is not None and self._connection is not None:
            self._connection.hold(waiting)

    def _wake(self) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(None)


class EngineConnections:
    """The connections to one engine. Create it inside the event loop that uses it."""

    def __init__(
        self,
        base: str,
        *,
        api_key: str | None,
        limit: int,
        connect_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        """Create the client without a connection. ``base`` is the engine's URL without ``/v1``.
        ``limit`` is the maximum number of connections; further requests wait for one.
        ``stall_timeout_s`` is the longest silence within a response.

        Raises ``ValueError`` if ``base`` is not an HTTP URL.
        """
        self.loop = asyncio.get_running_loop()
        self.stall_timeout_s = stall_timeout_s
        self._address = address = EngineAddress.of(base)
        self._tls = ssl.create_default_context() if address.tls else None
        self._prefix = address.prefix
        headers = address.headers(api_key)
        self._common = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._connect_timeout_s = connect_timeout_s
        self._limit = limit
        self.connection_epoch = 0
        self.any_open = False
        self._open: set[_Connection] = set()
        self._connecting = 0
        self._idle: list[_Connection] = []
        """The idle connections; the one that was used last is at the end."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._look_every_s = min(1.0, stall_timeout_s / 4)
        self._looks: asyncio.TimerHandle | None = None
        """The timer of the next check for stalled and idle connections; it runs while any is
        open."""

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: str = "",
        timeout_s: float | None = None,
        connection_epoch: int | None = None,
    ) -> PooledResponse:
        """See :meth:`bridle.proxy.engines.transport.EngineTransport.request`."""
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._common}{headers}"
            f"content-length: {len(body)}\r\n\r\n"
        )
        connection = self._unused() or await self._connected()
        if connection_epoch is not None and connection_epoch != self.connection_epoch:
            self.free(connection)
            raise ConnectionEpochOver
        response = connection.ask(head.encode("latin-1") + body, timeout_s or self.stall_timeout_s)
        try:
            await response.head
        except BaseException:
            response.close()
            raise
        return response

    async def close(self) -> None:
        """End every connection, running responses included."""
        if self._looks is not None:
            self._looks.cancel()
        for connection in list(self._open):
            connection.abandon()

    def _unused(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    async def _connected(self) -> _Connection:
        """Return a new connection, or one that has become free while all were in use."""
        while len(self._open) + self._connecting >= self._limit:
            turn: asyncio.Future[None] = self.loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._next()
                raise
            if (connection := self._unused()) is not None:
                return connection
        self._connecting += 1
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self.loop.create_connection(
                    partial(_Connection, self),
                    self._address.host,
                    self._address.port,
                    ssl=self._tls,
                )
        except BaseException as error:
            self._next()
            if isinstance(error, OSError):  # ssl.SSLError and TimeoutError among them
                raise ConnectionFailed(str(error) or "no connection in time") from error
            raise
        finally:
            self._connecting -= 1
        return connection

    # -- from the connections --------------------------------------------------------------------

    def opened(self, connection: _Connection) -> None:
        if all(one.transport.is_closing() for one in self._open):
            self.connection_epoch += 1
        self._open.add(connection)
        self.any_open = True
        if self._looks is None:
            self._looks = self.loop.call_later(self._look_every_s, self._look)

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        self.any_open = bool(self._open)
        if connection in self._idle:
            self._idle.remove(connection)
        self._next()

    def free(self, connection: _Connection) -> None:
        """Put a connection on which no response is awaited back into use."""
        self._idle.append(connection)
        if self._waiting:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _look(self) -> None:
        now = self.loop.time()
        for connection in list(self._open):
            connection.look(now)
        again = bool(self._open)
        self._looks = self.loop.call_later(self._look_every_s, self._look) if again else None


class _Connection(asyncio.Protocol):
    """A connection, which serves one request at a time."""

    def __init__(self, pool: EngineConnections) -> None:
        self.loop = pool.loop
        self.last_read = 0.0
        self._pool = pool
        self._response: PooledResponse | None = None
        self.transport: Any = None
        self._timeout_s = 0.0
        self._held = False
        """True while the follower wants no more."""
        self._later = memoryview(b"")
        """The rest of the latest read, which is fed in the next turns of the event loop."""

    def ask(self, request: bytes, timeout_s: float) -> PooledResponse:
        """Send ``request`` and return its response, which is yet to come."""
        response = self._response = PooledResponse(self)
        self._pieces: list[bytes] = []
        self._header_bytes = 0
        self._framed = self._keep = self._whole = False
        self.last_read = self.loop.time()
        self._timeout_s = timeout_s
        self.transport.write(request)
        return response

    def hold(self, waiting: asyncio.Future[Any]) -> None:
        """Read no more until ``waiting`` is done."""
        if not self._held:
            self._held = True
            self.transport.pause_reading()
            waiting.add_done_callback(self._go_on)

    def hurry(self) -> None:
        """Shorten the timeout, because only the end of the response is still awaited."""
        self._timeout_s = min(self._timeout_s, _IDLE_S)

    def abandon(self) -> None:
        """Close the connection at once. A response that is not whole fails."""
        response, self._response = self._response, None
        self.transport.abort()
        if response is not None:
            response.failed(ConnectionBroke("the connection was closed here"))

    def _go_on(self, _: asyncio.Future[Any]) -> None:
        self._held = False
        self.last_read = self.loop.time()
        self._turn()

    def _turn(self) -> None:
        """Feed a slice of the latest read; after the last slice, read again."""
        if self._held or self.transport.is_closing():
            return
        if self._later:
            piece, self._later = self._later[:_SLICE_BYTES], self._later[_SLICE_BYTES:]
            self.data_received(bytes(piece))
            if not self._held:
                self.loop.call_soon(self._turn)
        else:
            self.transport.resume_reading()

    def look(self, now: float) -> None:
        """End a response that has stalled, or a connection that has been idle for long."""
        silent_s = now - self.last_read
        if self._response is None:
            if silent_s >= _IDLE_S:
                self.abandon()
        elif not self._held and silent_s >= self._timeout_s:
            self._fail(TimeoutError("the engine sent nothing for too long"))

    def _fail(self, error: Exception) -> None:
        response, self._response = self._response, None
        self.abandon()
        if response is not None:
            response.failed(error)

    # -- asyncio's side --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.last_read = self.loop.time()
        self._parser = httptools.HttpResponseParser(self)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:  # nothing was asked
            self.abandon()
            return
        if len(data) > _SLICE_BYTES:
            self._later = memoryview(data)
            self.transport.pause_reading()
            self._turn()
            return
        self.last_read = self.loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionBroke(f"this is not HTTP: {error}"))
            return
        if self._whole:
            self._finish(response)
        elif self._pieces:
            pieces, self._pieces = self._pieces, []
            response.arrived(pieces, whole=False)

    def connection_lost(self, exc: Exception | None) -> None:
        response, self._response = self._response, None
        self._pool.lost(self)
        if response is None:
            return
        if exc is None and response.head.done() and not self._framed:
            response.arrived(self._pieces, whole=True)  # the end of the connection is the body's
        else:
            response.failed(ConnectionBroke("the engine ended the connection"))

    def _finish(self, response: PooledResponse) -> None:
        self._response = None
        if self._keep and not self._held and not self._later:
            self._pool.free(self)
        else:
            self.transport.close()
        response.arrived(self._pieces, whole=True)

    # -- the parser's side -----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._whole:
            raise ValueError("one request was answered twice")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _HEADER_BYTES:
            raise ValueError("the response's headers are too large")
        if self._response is not None and not self._response.head.done():  # not a trailer
            self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        response = self._response
        status = self._parser.get_status_code()
        if response is None:
            return
        if status < 200:
            response.headers.clear()
            return
        response.status = status
        headers = response.headers
        self._framed = "content-length" in headers or "transfer-encoding" in headers
        self._keep = self._parser.should_keep_alive()
        if not response.head.done():
            response.head.set_result(None)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._whole = self._parser.get_status_code() >= 200
