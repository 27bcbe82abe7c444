"""The connections to one engine: a small HTTP/1.1 client on httptools.

A general client also handles redirects, cookies and encodings, and has a stream reader that wakes
tasks of its own, which costs a recording proxy more than recording does. Here the bytes of one
network read go straight to the follower of the response, in the loop's own callback and all at
once. A large read is fed in slices, one in each turn of the event loop, and no more is read
meanwhile: libuv would read a busy socket up to 32 times before it looks at any other.

Every request is a protocol of its own on a transport that it takes over from an earlier one, so
that nothing of one response can reach another.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import httptools

from bridle.errors import BridleError
from bridle.proxy.engines.addresses import EngineAddress

ANSWER_BYTES: Final = 16 << 20
"""Maximum bytes of a body that :meth:`EngineResponse.read` reads: a model list, a token count or a
refusal."""
_HEADER_BYTES: Final = 64 * 1024
_IDLE_S: Final = 3.0
"""Seconds until an idle connection is closed. Together with the second between two checks, this is
shorter than uvicorn's 5 s, so that connections are closed here before the engine closes them."""
_SLICE_BYTES: Final = 16 * 1024
"""Bytes that are fed in one turn of the event loop, some 200 events of a stream. A line that goes
on after them is fed with them, because it costs little until its end has come."""

Follower = Callable[[bytes], "asyncio.Future[Any] | None"]
"""A callback for the bytes of one read. It returns a future to await before more is read, or
``None``."""


class ConnectionFailed(BridleError):
    """No connection to the engine could be made."""

    retryable = True


class ConnectionBroke(BridleError):
    """The connection ended, or stopped making sense, before the response was whole."""

    retryable = True


class ConnectionEpochOver(BridleError):
    """All connections to the engine were lost since the given epoch; nothing has been sent."""

    retryable = True


class EngineResponse(asyncio.Protocol):
    """One request on a connection, and its response from the status line on."""

    def __init__(self, pool: EngineConnections, transport: Any = None) -> None:
        self.transport = transport
        self.status = 0
        """The status; 0 until the headers have arrived."""
        self.headers: dict[str, str] = {}
        """The response's headers, with lower-case names."""
        self.waiting: asyncio.Future[None] = pool.loop.create_future()
        """A future that is done when the headers have arrived, then another one for the end."""
        self.failure: Exception | None = None
        self.last_read = pool.loop.time()
        self._pool = pool
        self.timeout_s = 0.0
        self._pieces: list[bytes] = []
        self._header: dict[bytes, bytes] = {}
        # Two callbacks of the parser, which are called for every chunk and every header.
        self.on_body = self._pieces.append
        self.on_header = self._header.__setitem__
        self.parser: httptools.HttpResponseParser | None = None
        """The parser while the response is awaited: from the request on until it is whole or has
        failed."""
        self._follower: Follower | None = None
        self._bytes_without_body = 0
        """Bytes of headers, or of what else stands between two parts of the body."""
        self._framed = self._keep = self._whole = self._left = False
        self._held = False
        """True while the follower wants no more."""
        self._later: deque[bytes] = deque()
        """The rest of the latest read, which is fed in the next turns of the event loop."""

    async def read(self) -> bytes:
        """Read the whole body, once.

        Raises ``TimeoutError`` and :class:`ConnectionBroke`, the latter also for a body of more
        than :data:`ANSWER_BYTES`.
        """
        body = bytearray()

        def take(piece: bytes) -> None:
            body.extend(piece)
            if len(body) > ANSWER_BYTES:
                raise ConnectionBroke(f"the answer has more than {ANSWER_BYTES} bytes")

        await self.follow(take)
        return bytes(body)

    async def follow(self, follower: Follower) -> None:
        """Pass the body to ``follower``, read by read, and return when it is whole.

        Raises :class:`ConnectionBroke`, ``TimeoutError``, and any exception that ``follower``
        raises.
        """
        self._follower = follower
        try:
            if self._pieces:
                self._hand_over(follower)
            if self.parser is not None and not self._left:
                self.waiting = self._pool.loop.create_future()
                await self.waiting
        finally:
            self._follower = None
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """End the connection unless the response is whole; the engine then stops generating."""
        self._fail(ConnectionBroke("the connection was closed here"))

    def leave(self) -> None:
        """Make :meth:`follow` return, because the follower needs no more.

        The rest of the response is read and dropped if it comes soon, and the connection stays for
        the next request.
        """
        self.timeout_s = min(self.timeout_s, _IDLE_S)
        self._left = True
        self._wake()

    def look(self, now: float) -> None:
        """End a response that has stalled, or a connection that has been idle for long."""
        silent_s = now - self.last_read
        if self.parser is None:
            if silent_s >= _IDLE_S:
                self.transport.abort()
        elif not self._held and silent_s >= self.timeout_s:
            self._fail(TimeoutError("the engine sent nothing for too long"))

    def _fail(self, error: Exception) -> None:
        if self.parser is not None:
            self.parser = None
            self.transport.abort()
            self._pool.slots.release()
            if not self._left:
                self.failure = self.failure or error
            self._wake()

    def _wake(self) -> None:
        if not self.waiting.done():
            self.waiting.set_result(None)

    def _hand_over(self, follower: Follower) -> None:
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        try:
            waiting = follower(body)
        except Exception as error:  # noqa: BLE001 - raised again where the response is awaited
            self.failure = error
            self.close()
            return
        if waiting is not None and self.parser is not None and not self._held:
            self._held = True
            self.transport.pause_reading()
            waiting.add_done_callback(self._go_on)

    def _go_on(self, _: asyncio.Future[Any]) -> None:
        self._held = False
        self.last_read = self._pool.loop.time()
        self._turn()

    def _turn(self) -> None:
        """Feed a slice of the latest read; after the last slice, read again."""
        if self._held or self.transport.is_closing():
            return
        if self._later:
            self._feed(self._later.popleft())
            if not self._held:
                self._pool.loop.call_soon(self._turn)
        else:
            self.transport.resume_reading()

    # -- asyncio's side --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.parser is None:  # nothing was asked
            self.transport.abort()
            return
        if len(data) > _SLICE_BYTES:
            self._later.extend(_slices(data))
            self.transport.pause_reading()
            self._turn()
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        if self.parser is None:
            self.transport.abort()
            return
        self.last_read = self._pool.loop.time()
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionBroke(f"this is not HTTP: {error}"))
            return
        if self._whole:
            self._finish(keep=self._keep and not self._held and not self._later)
        elif not self._pieces:
            self._bytes_without_body += len(data)
            if self._bytes_without_body > _HEADER_BYTES:
                self._fail(ConnectionBroke("the response's headers are too large"))
        else:
            self._bytes_without_body = 0
            if self._left:
                self._pieces.clear()
            elif self._follower is not None:
                self._hand_over(self._follower)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.lost(self)
        if exc is None and self.status and not self._framed and self.parser is not None:
            self._finish(keep=False)  # the end of the connection is the body's
        else:
            self._fail(ConnectionBroke("the engine ended the connection"))

    def _finish(self, *, keep: bool) -> None:
        self.parser = None
        self._pool.slots.release()
        if keep:
            self._pool.idle.append(self)
        else:
            self.transport.close()
        if self._pieces and self._follower is not None and not self._left:
            self._hand_over(self._follower)
        if not self.waiting.done():
            self.waiting.set_result(None)

    # -- the parser's side -----------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        parser = self.parser
        if parser is None or self._whole:
            raise ValueError("one request was answered twice")
        status = parser.get_status_code()
        if status < 200:
            self._header.clear()
            return
        self.status, headers = status, self.headers
        for name, value in self._header.items():
            headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self._framed = "content-length" in headers or "transfer-encoding" in headers
        self._keep = parser.should_keep_alive()
        if not self.waiting.done():
            self.waiting.set_result(None)

    def on_message_complete(self) -> None:
        self._whole = self.status >= 200


def _slices(data: bytes) -> Iterator[bytes]:
    """Yield ``data`` in slices of :data:`_SLICE_BYTES` and what its last line has after them."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + _SLICE_BYTES - 1) + 1 or len(data)
        yield data[start:end]
        start = end


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
        """Create the client without a connection.

        ``base`` is the engine's URL without ``/v1``. ``limit`` is the maximum number of
        connections; further requests wait for one. ``stall_timeout_s`` is the longest silence
        within a response.

        Raises ``ValueError`` if ``base`` is not an HTTP URL.
        """
        self.loop = asyncio.get_running_loop()
        self.connection_epoch = 0
        """A number that grows when a connection is made while no other is open. Within one epoch
        the same process answers; in a later one, the engine may have been restarted."""
        self.any_open = False
        """True if a connection is open; if none is, the next request begins another epoch."""
        self.slots = asyncio.Semaphore(limit)
        """Taken by each request until its response is whole or has failed."""
        self.idle: list[EngineResponse] = []
        """The last responses on the idle connections; the one that came last is at the end."""
        self._address = address = EngineAddress.of(base)
        self._tls = ssl.create_default_context() if address.tls else None
        headers = address.headers(api_key)
        credentials = headers.pop("authorization", None)
        self._common = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._credentials = f"authorization: {credentials}\r\n" if credentials else ""
        self._api_key = api_key
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._open: dict[Any, EngineResponse] = {}
        """The latest response on each open transport."""
        self._closed = False
        self._look_every_s = min(1.0, stall_timeout_s / 4)
        self._looks: asyncio.TimerHandle | None = None
        """The timer of the next check for stalled and idle connections; it runs while any is
        open."""

    async def request(
        self,
        method: str,
        path: str,
        *body: bytes,
        headers: str = "",
        key_header: str | None = None,
        timeout_s: float | None = None,
        connection_epoch: int | None = None,
    ) -> EngineResponse:
        """Send a request and return the response once its headers are read.

        ``body`` are the pieces of its body. ``headers`` are whole lines, each with its line end.
        ``key_header`` is the header for the key, if it is not ``authorization``. ``timeout_s``
        replaces the stall timeout. With ``connection_epoch``, the request is sent only within that
        epoch.

        Raises :class:`ConnectionFailed`, :class:`ConnectionBroke`, ``TimeoutError`` and
        :class:`ConnectionEpochOver`.
        """
        credentials = self._credentials
        if key_header is not None and self._api_key:
            credentials = f"{key_header}: {self._api_key}\r\n"
        head = (
            f"{method} {self._address.prefix}{path} HTTP/1.1\r\n"
            f"{self._common}{credentials}{headers}"
            f"content-length: {sum(map(len, body))}\r\n\r\n"
        )
        await self.slots.acquire()
        idle = self.idle
        while idle and idle[-1].transport.is_closing():
            idle.pop()
        if idle:
            transport = idle.pop().transport
            response = self._open[transport] = EngineResponse(self, transport)
            transport.set_protocol(response)
        else:
            response = await self._connected()
        if connection_epoch is not None and connection_epoch != self.connection_epoch:
            self.slots.release()
            idle.append(response)
            raise ConnectionEpochOver
        response.parser = httptools.HttpResponseParser(response)
        response.timeout_s = timeout_s or self._stall_timeout_s
        if len(body) > 1:
            response.transport.writelines((head.encode("latin-1"), *body))
        else:
            response.transport.write(b"".join((head.encode("latin-1"), *body)))
        try:
            await response.waiting
        except BaseException:
            response.close()
            raise
        if response.failure is not None and not response.status:
            raise response.failure
        return response

    async def close(self) -> None:
        """End every connection, running responses included. Later requests fail."""
        self._closed = True
        if self._looks is not None:
            self._looks.cancel()
        for response in list(self._open.values()):
            response.close()
            response.transport.abort()

    async def _connected(self) -> EngineResponse:
        """Return an idle response on a new connection. Gives the slot back if there is none."""
        try:
            if self._closed:
                raise ConnectionFailed("the connections to the engine are closed")
            async with asyncio.timeout(self._connect_timeout_s):
                _, response = await self.loop.create_connection(
                    lambda: EngineResponse(self),
                    self._address.host,
                    self._address.port,
                    ssl=self._tls,
                )
        except BaseException as error:
            self.slots.release()
            if isinstance(error, OSError):  # ssl.SSLError and TimeoutError among them
                raise ConnectionFailed(str(error) or "no connection in time") from error
            raise
        return response

    # -- from the connections --------------------------------------------------------------------

    def opened(self, response: EngineResponse) -> None:
        if all(transport.is_closing() for transport in self._open):
            self.connection_epoch += 1
        self._open[response.transport] = response
        self.any_open = True
        if self._looks is None:
            self._looks = self.loop.call_later(self._look_every_s, self._look)

    def lost(self, response: EngineResponse) -> None:
        self._open.pop(response.transport, None)
        self.any_open = bool(self._open)
        if response in self.idle:
            self.idle.remove(response)

    def _look(self) -> None:
        now = self.loop.time()
        for response in list(self._open.values()):
            response.look(now)
        again = bool(self._open)
        self._looks = self.loop.call_later(self._look_every_s, self._look) if again else None
