"""The engine transport in its plainest form: one connection for each request, read by h11.

It makes no promise about speed and is what the fast one is compared with. Since every request has a
connection of its own, every request begins a new connection epoch, and an engine's weights are
compared before each call instead of once for many.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

import h11

from bridle.proxy.engines.transport import (
    ConnectionBroke,
    ConnectionEpochOver,
    ConnectionFailed,
    EngineAddress,
    Follower,
)

_READ_BYTES: Final = 65_536


class PlainResponse:
    """One response from its status line on."""

    def __init__(self, connection: _Connection, head: h11.Response) -> None:
        self.status = head.status_code
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers
        }
        self._connection = connection
        self._left = False

    async def read(self) -> bytes:
        pieces: list[bytes] = []
        await self.follow(pieces.append)
        return b"".join(pieces)

    async def follow(self, follower: Follower) -> None:
        try:
            while not self._left:
                event = await self._connection.event()
                if isinstance(event, h11.EndOfMessage):
                    self._connection.expect_silence()
                    return
                assert isinstance(event, h11.Data)  # noqa: S101 - nothing else follows a head
                waiting = follower(bytes(event.data))
                if waiting is not None:
                    await waiting
        finally:
            self.close()

    def close(self) -> None:
        self._connection.close()

    def leave(self) -> None:
        self._left = True


class PlainTransport:
    """See :class:`bridle.proxy.engines.transport.EngineTransport`."""

    def __init__(
        self,
        base: str,
        *,
        api_key: str | None,
        limit: int,
        connect_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self.connection_epoch = 0
        self.any_open = False
        self._address = address = EngineAddress.of(base)
        self._headers = address.headers(api_key)
        self._tls = ssl.create_default_context() if address.tls else None
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._slots = asyncio.Semaphore(limit)
        self._open: set[_Connection] = set()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: str = "",
        timeout_s: float | None = None,
        connection_epoch: int | None = None,
    ) -> PlainResponse:
        lines = dict(line.split(": ", 1) for line in headers.splitlines())
        head = h11.Request(
            method=method,
            target=self._address.prefix + path,
            headers=[
                *{**self._headers, **lines}.items(),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ],
        )
        connection = await self._connected(timeout_s or self._stall_timeout_s)
        try:
            if connection_epoch not in (None, self.connection_epoch):
                raise ConnectionEpochOver
            await connection.send(head, body)
            while True:
                event = await connection.event()
                if isinstance(event, h11.Response):
                    return PlainResponse(connection, event)
        except BaseException:
            connection.close()
            raise

    async def close(self) -> None:
        for connection in list(self._open):
            connection.close()

    async def _connected(self, timeout_s: float) -> _Connection:
        await self._slots.acquire()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                reader, writer = await asyncio.open_connection(
                    self._address.host, self._address.port, ssl=self._tls
                )
        except BaseException as error:
            self._slots.release()
            if isinstance(error, OSError):
                raise ConnectionFailed(str(error) or "no connection in time") from error
            raise
        if not self._open:
            self.connection_epoch += 1
        connection = _Connection(self, reader, writer, timeout_s)
        self._open.add(connection)
        self.any_open = True
        return connection

    def ended(self, connection: _Connection) -> None:
        """The connection is closed."""
        self._open.discard(connection)
        self.any_open = bool(self._open)
        self._slots.release()


class _Connection:
    """One request's connection."""

    def __init__(
        self,
        transport: PlainTransport,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        timeout_s: float,
    ) -> None:
        self._transport = transport
        self._reader = reader
        self._writer = writer
        self._timeout_s = timeout_s
        self._http = h11.Connection(h11.CLIENT)
        self._closed = False

    async def send(self, head: h11.Request, body: bytes) -> None:
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()

    async def event(self) -> h11.Event:
        """The next event of the response. Raises :class:`ConnectionBroke` and ``TimeoutError``."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                async with asyncio.timeout(self._timeout_s):
                    data = await self._reader.read(_READ_BYTES)
                if self._closed:
                    raise ConnectionBroke("the connection was closed here")
                self._http.receive_data(data)
        except (h11.RemoteProtocolError, ConnectionError) as error:
            raise ConnectionBroke(str(error)) from error
        if not isinstance(event, h11.Event):
            raise ConnectionBroke("the engine ended the connection")
        return event

    def expect_silence(self) -> None:
        """Raises :class:`ConnectionBroke` when more than one response was sent."""
        if self._http.trailing_data[0]:
            raise ConnectionBroke("one request was answered twice")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._writer.transport.abort()
            self._transport.ended(self)
