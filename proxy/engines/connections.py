"""A small HTTP/1.1 client for one engine: pooled connections on httptools, replies pushed as read.

What a general client does beside this (redirects, cookies, encodings, a stream reader with its own
task wake-ups) costs a recording proxy more than recording does. Here the bytes of one network read
go straight to whoever follows the reply, in the loop's own callback, and everything that arrived in
that read goes at once.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

import httptools

from bridle.errors import BridleError

Follower = Callable[[bytes], "asyncio.Future[Any] | None"]
"""Takes the bytes of one read; returns what to wait for before more is read, if anything."""

_HEADER_BYTES: Final = 64 * 1024
_IDLE_S: Final = 4.0
"""Shorter than uvicorn's 5 s, so that we close idle connections before the engine does."""


class ConnectionFailed(BridleError):
    """No connection to the engine could be made."""

    retryable = True


class ConnectionBroke(BridleError):
    """The connection ended, or stopped making sense, before the reply was whole."""

    retryable = True


class ConnectionEpochOver(BridleError):
    """Connections to the engine were lost meanwhile, all of them; nothing has been sent."""

    retryable = True


class EngineReplied:
    """One reply from its status line on."""

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """Lower-case names."""
        self.head: asyncio.Future[None] = connection.loop.create_future()
        """Done when status and headers are there."""
        self._connection: _Connection | None = connection
        self._pieces: list[bytes] = []
        self._follower: Follower | None = None
        self._whole = self._left = False
        self._failure: Exception | None = None
        self._end: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """The whole body, once. Raises :class:`ConnectionBroke` and ``TimeoutError``."""
        await self._ended()
        pieces, self._pieces = self._pieces, []  # whoever reads it may let it go before this
        return b"".join(pieces)

    async def follow(self, follower: Follower) -> None:
        """Gives the body to ``follower``, read by read, and returns when it is whole.

        Raises :class:`ConnectionBroke`, ``TimeoutError``, and whatever ``follower`` raises.
        """
        self._follower = follower
        pieces, self._pieces = self._pieces, []
        if pieces:
            self._hand_over(follower, pieces)
        await self._ended()

    def close(self) -> None:
        """Ends the connection unless the reply is whole, by which the engine stops generating."""
        self._follower = None
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None

    def leave(self) -> None:
        """Whoever follows needs no more and goes on; the rest, when it comes soon, is read for
        nobody, and the connection stays for the next request."""
        if self._connection is not None:
            self._connection.hurry()
        self._follower, self._left = None, True
        self._wake()

    async def _ended(self) -> None:
        if not self._whole and not self._left and self._failure is None:
            assert self._connection is not None, "the reply was closed"  # noqa: S101
            self._end = self._connection.loop.create_future()
            await self._end
        if self._failure is not None:
            raise self._failure

    # -- from the connection ---------------------------------------------------------------------

    def arrived(self, pieces: list[bytes], *, whole: bool) -> None:
        """What one read brought."""
        if whole:
            self._whole = True
            self._connection = None
        if self._left:
            return
        if self._follower is None:
            self._pieces += pieces
        elif pieces:
            self._hand_over(self._follower, pieces)
        if whole:
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
        except Exception as error:  # noqa: BLE001 - raised again where the reply is waited for
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
    """The connections to one engine. Make it inside the event loop that uses it."""

    def __init__(
        self,
        base: str,
        *,
        api_key: str | None,
        limit: int,
        connect_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        """``base`` is the engine's URL without ``/v1``. ``limit``: connections at a time; more
        requests wait for one. ``stall_timeout_s``: the longest silence within a reply.

        Raises ``ValueError`` for a URL that is none of HTTP."""
        url = urlsplit(base)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base!r} is not the URL of an engine")
        self.loop = asyncio.get_running_loop()
        self.stall_timeout_s = stall_timeout_s
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._prefix = quote(url.path, safe="/%:@!$&'()*+,;=~")
        self._common = _common_headers(url.netloc, url.username, url.password, api_key)
        self._connect_timeout_s = connect_timeout_s
        self._limit = limit
        self.connection_epoch = 0
        """Grows when a connection is made while no other is open. Within one epoch the same process
        answers; after it, the engine may have been started anew."""
        self._open: set[_Connection] = set()
        self._connecting = 0
        self._idle: list[_Connection] = []
        """The latest used is the last."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def any_open(self) -> bool:
        """Whether the epoch goes on; else the next request begins another."""
        return bool(self._open)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: str = "",
        timeout_s: float | None = None,
        connection_epoch: int | None = None,
    ) -> EngineReplied:
        """The reply, its headers read. ``headers`` are whole lines, each with its line end;
        ``timeout_s`` replaces the stall timeout; ``connection_epoch``: only within that one.

        Raises :class:`ConnectionFailed`, :class:`ConnectionBroke`, ``TimeoutError`` and
        :class:`ConnectionEpochOver`.
        """
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._common}{headers}"
            f"content-length: {len(body)}\r\n\r\n"
        )
        connection = self._unused() or await self._connected()
        if connection_epoch is not None and connection_epoch != self.connection_epoch:
            self.free(connection)
            raise ConnectionEpochOver
        reply = connection.ask(head.encode("latin-1") + body, timeout_s or self.stall_timeout_s)
        try:
            await reply.head
        except BaseException:
            reply.close()
            raise
        return reply

    async def close(self) -> None:
        """Ends every connection, running replies included."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._open):
            connection.abandon()

    def _unused(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connected(self) -> _Connection:
        """A new connection, or one that has become free while all were in use."""
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
                    partial(_Connection, self), self._host, self._port, ssl=self._tls
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
        if not any(one.usable for one in self._open):
            self.connection_epoch += 1
        self._open.add(connection)

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._next()

    def free(self, connection: _Connection) -> None:
        """No reply is awaited on the connection, and it may be used again."""
        self._idle.append(connection)
        self._next()
        if self._sweep is None:
            self._sweep = self.loop.call_later(_IDLE_S / 2, self._close_idle)

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _close_idle(self) -> None:
        limit = self.loop.time() - _IDLE_S / 2
        for connection in [one for one in self._idle if one.last_read <= limit]:
            connection.abandon()
        waits = bool(self._idle)
        self._sweep = self.loop.call_later(_IDLE_S / 2, self._close_idle) if waits else None


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, pool: EngineConnections) -> None:
        self.loop = pool.loop
        self.last_read = 0.0
        self._pool = pool
        self._reply: EngineReplied | None = None
        self._transport: Any = None
        self._timeout_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        """Looks for a stall. It outlives its request: one timer serves many short ones."""
        self._looks_at = 0.0
        self._held = False
        """The follower wants no more for now."""

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    def ask(self, request: bytes, timeout_s: float) -> EngineReplied:
        """Sends ``request``; its reply is to come."""
        reply = self._reply = EngineReplied(self)
        self._pieces: list[bytes] = []
        self._header_bytes = 0
        self._framed = self._keep = self._whole = False
        self.last_read = self.loop.time()
        self._timeout_s = timeout_s
        self._look_by(self.last_read + timeout_s)
        self._transport.write(request)
        return reply

    def hold(self, waiting: asyncio.Future[Any]) -> None:
        """Reads no more until ``waiting`` is done."""
        if not self._held:
            self._held = True
            self._transport.pause_reading()
            waiting.add_done_callback(self._go_on)

    def hurry(self) -> None:
        """Only the end of the reply is still awaited, and not for long."""
        self._timeout_s = min(self._timeout_s, _IDLE_S)
        self._look_by(self.loop.time() + self._timeout_s)

    def abandon(self) -> None:
        """Closes at once. A reply that is not whole will not become so."""
        reply, self._reply = self._reply, None
        if self._timer is not None:
            self._timer.cancel()
        self._transport.abort()
        if reply is not None:
            reply.failed(ConnectionBroke("the connection was closed here"))

    def _go_on(self, _: asyncio.Future[Any]) -> None:
        self._held = False
        self.last_read = self.loop.time()
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _look_by(self, time: float) -> None:
        if self._timer is not None:
            if self._looks_at <= time:
                return
            self._timer.cancel()
        self._looks_at = time
        self._timer = self.loop.call_at(time, self._look)

    def _look(self) -> None:
        """Whether the reply has stalled."""
        self._timer = None
        if self._reply is None:
            return
        now = self.loop.time()
        due = (now if self._held else self.last_read) + self._timeout_s
        if due > now:
            self._look_by(due)
        else:
            self._fail(TimeoutError("the engine sent nothing for too long"))

    def _fail(self, error: Exception) -> None:
        reply, self._reply = self._reply, None
        self.abandon()
        if reply is not None:
            reply.failed(error)

    # -- asyncio's side --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.last_read = self.loop.time()
        self._parser = httptools.HttpResponseParser(self)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None:  # nobody asked
            self.abandon()
            return
        self.last_read = self.loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionBroke(f"this is not HTTP: {error}"))
            return
        if self._whole:
            self._finish(reply)
        elif self._pieces:
            pieces, self._pieces = self._pieces, []
            reply.arrived(pieces, whole=False)

    def connection_lost(self, exc: Exception | None) -> None:
        reply, self._reply = self._reply, None
        if self._timer is not None:
            self._timer.cancel()
        self._pool.lost(self)
        if reply is None:
            return
        if exc is None and reply.head.done() and not self._framed:
            reply.arrived(self._pieces, whole=True)  # the end of the connection is the body's
        else:
            reply.failed(ConnectionBroke("the engine ended the connection"))

    def _finish(self, reply: EngineReplied) -> None:
        self._reply = None
        if self._keep and not self._held:
            self._pool.free(self)
        else:
            self._transport.close()
        reply.arrived(self._pieces, whole=True)

    # -- the parser's side -----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._whole:
            raise ValueError("one request was answered twice")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _HEADER_BYTES:
            raise ValueError("the reply's headers are too large")
        if self._reply is not None:
            self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        reply = self._reply
        status = self._parser.get_status_code()
        if reply is None:
            return
        if status < 200:
            reply.headers.clear()
            return
        reply.status = status
        headers = reply.headers
        self._framed = "content-length" in headers or "transfer-encoding" in headers
        self._keep = self._parser.should_keep_alive()
        if not reply.head.done():
            reply.head.set_result(None)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._whole = self._parser.get_status_code() >= 200


def _common_headers(
    netloc: str, username: str | None, password: str | None, api_key: str | None
) -> str:
    """The header lines of every request. Raises ``ValueError`` for a key with a line end."""
    lines = [
        f"host: {netloc.rpartition('@')[2]}",
        "content-type: application/json",
        "accept-encoding: identity",
    ]
    if api_key:
        lines.append(f"authorization: Bearer {api_key}")
    elif username is not None:
        pair = f"{unquote(username)}:{unquote(password or '')}"
        lines.append(f"authorization: Basic {base64.b64encode(pair.encode()).decode()}")
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("the engine's key or address has a line end in it")
    return "".join(f"{line}\r\n" for line in lines)
