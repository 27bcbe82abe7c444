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

from bridle.proxy.engines.addresses import EngineAddress
from bridle.proxy.engines.transport import (
    ConnectionBroke,
    ConnectionEpochOver,
    ConnectionFailed,
    Follower,
)

_READ_BYTES: Final = 65_536


class PlainResponse:
    """One request's connection, and the response from its status line on."""

    def __init__(
        self,
        transport: PlainTransport,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        timeout_s: float,
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._transport = transport
        self._reader, self._writer = streams
        self._timeout_s = timeout_s
        self._http = h11.Connection(h11.CLIENT)
        self._closed = self._left = False

    async def ask(self, head: h11.Request, body: bytes) -> None:
        """Sends the request; returns when the response's headers are read."""
        for part in (head, h11.Data(data=body), h11.EndOfMessage()):
            self._writer.write(self._http.send(part) or b"")
        await self._writer.drain()
        while not isinstance(event := await self._event(), h11.Response):
            pass
        self.status = event.status_code
        for name, value in event.headers:
            self.headers[name.decode("latin-1")] = value.decode("latin-1")

    async def read(self) -> bytes:
        body = bytearray()
        await self.follow(body.extend)
        return bytes(body)

    async def follow(self, follower: Follower) -> None:
        try:
            while not self._left:
                event = await self._event()
                if isinstance(event, h11.EndOfMessage):
                    if self._http.trailing_data[0]:
                        raise ConnectionBroke("one request was answered twice")
                    return
                assert isinstance(event, h11.Data)
                waiting = follower(bytes(event.data))
                if waiting is not None:
                    await waiting
        finally:
            self.close()

    def leave(self) -> None:
        self._left = True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._writer.transport.abort()
            self._transport.ended(self)

    async def _event(self) -> h11.Event:
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


class PlainTransport:
    """See :class:`bridle.proxy.engines.transport.EngineConnections`."""

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
        self._open: set[PlainResponse] = set()

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
        response = await self._connected(timeout_s or self._stall_timeout_s)
        try:
            if connection_epoch not in (None, self.connection_epoch):
                raise ConnectionEpochOver
            await response.ask(head, body)
        except BaseException:
            response.close()
            raise
        return response

    async def close(self) -> None:
        for response in list(self._open):
            response.close()

    async def _connected(self, timeout_s: float) -> PlainResponse:
        await self._slots.acquire()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                streams = await asyncio.open_connection(
                    self._address.host, self._address.port, ssl=self._tls
                )
        except BaseException as error:
            self._slots.release()
            if isinstance(error, OSError):
                raise ConnectionFailed(str(error) or "no connection in time") from error
            raise
        if not self._open:
            self.connection_epoch += 1
        response = PlainResponse(self, streams, timeout_s)
        self._open.add(response)
        self.any_open = True
        return response

    def ended(self, response: PlainResponse) -> None:
        """The response's connection is closed."""
        self._open.discard(response)
        self.any_open = bool(self._open)
        self._slots.release()
