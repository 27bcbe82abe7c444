"""The HTTP protocol of uvicorn with a short way to send.

The short way is for whole responses and for the chunks of a stream that has begun.

ASGI's ``send`` is a coroutine that takes a dictionary and checks the whole state of the response
again. For a chunk of 200 bytes, that costs more than all other work of the proxy. The scope
therefore offers a :class:`ShortWay` as :data:`EXTENSION`. The extension is optional: under any
other ASGI server, unmodified uvicorn included, the proxy sends as usual, and the tests run over
both.

Chunks that are handed over in one turn of the event loop go to their sockets at its end, one after
the other. Alternating between Python and the kernel's network for each chunk costs a tenth more,
which delays all streams when there are hundreds of them.

An offer to continue in another protocol (``Upgrade: h2c``, which Java's own client adds to every
request) is ignored, as RFC 9110 permits. The parser would drop the body of a request with such an
offer, so the offer is removed before parsing. A WebSocket's offer is shown to the application,
which refuses it. Fields that come after a chunked body are not headers of the request.

uvloop accepts one connection in a turn of the event loop, and a turn in which many streams are
served is long. A connection that is accepted therefore brings all that wait behind it with it.

The limits of the application's settings apply here to everything around a complete request: the
number of connections, the time for a head, and the time for a body that nobody reads any more.
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

EXTENSION: Final = "bridle.short_way"
"""Key of the :class:`ShortWay` in ``scope["extensions"]``."""

_LINE: Final = b"%b: %b\r\n"
_FULL: Final = 1 << 18
"""Maximum bytes that wait for the end of the turn."""

_OFFER: Final = re.compile(
    rb"(?<=\r\n)upgrade:(?![ \t]*websocket[ \t]*\r\n)[^\r\n]*\r\n", re.IGNORECASE
)
_HEADERS_REACH: Final = 1 << 14
"""Maximum bytes of a read that are searched for an offer."""
_WITHOUT_END: Final = 1 << 20
"""Maximum bytes of a head, or of a trailer; beyond it the connection is closed. The parser keeps
all of them and copies them with each read, before the request is authenticated."""


_ACCEPTED_AT_ONCE: Final = 256
"""Maximum connections that are accepted together."""
_LOOK_S: Final = 0.5
"""Seconds between two checks of a server's connections."""
_RESERVED_FILES: Final = 256
"""Number of files reserved for the store, its readers and what a process has open anyway."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of an application for its clients' connections, in its ``connection_limits``."""

    connections: int
    head_timeout_s: float
    body_timeout_s: float
    reached: Callable[[str], None]
    """Called with the name of the limit that ended a connection."""


def connections_allowed(wanted: int) -> int:
    """Return ``wanted``, or fewer if the process may not open enough files.

    A client's connection may need another one to an engine. The process's own limit is raised where
    that is permitted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(1, (soft - _RESERVED_FILES) // 2))


class Outbox:
    """The chunks to be written at the end of the current turn of one server's event loop."""

    __slots__ = ("__weakref__", "_chunks", "_loop", "_size")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._chunks: list[tuple[asyncio.Transport, bytes]] = []
        self._size = 0

    def put(self, transport: asyncio.Transport, data: bytes) -> None:
        if not self._chunks:
            self._loop.call_soon(self.flush)
        self._chunks.append((transport, data))
        self._size += len(data)
        if self._size > _FULL:
            self.flush()  # by which a transport can say that it is too much

    def flush(self) -> None:
        chunks, self._chunks, self._size = self._chunks, [], 0
        for transport, data in chunks:
            if not transport.is_closing():
                transport.write(data)


class ShortWay:
    """Sends one response without ASGI's ``send``."""

    __slots__ = ("_cycle", "_outbox", "flush")

    def __init__(self, cycle: RequestResponseCycle, outbox: Outbox) -> None:
        self._cycle = cycle
        self._outbox = outbox
        self.flush = outbox.flush
        """Writes the waiting chunks. It must be called before anything is sent the usual way, to
        keep the order."""

    def write(self, chunk: bytes) -> bool:
        """Write ``chunk`` (not empty) and return True.

        Return False if it must be sent the usual way: the response has not begun or is not chunked,
        or its client has gone or must be waited for.
        """
        cycle = self._cycle
        if not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected:
            return False
        self._outbox.put(cycle.transport, b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True

    def respond(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write the whole response and return True.

        Return False if it must be sent the usual way: its client has gone or must be waited for, or
        the server must process it (it ends the connection, answers ``HEAD``, adds headers of its
        own or logs).
        """
        cycle = self._cycle
        if cycle.response_started or cycle.disconnected or cycle.flow.write_paused:
            return False
        if not cycle.keep_alive or cycle.default_headers or cycle.access_log:
            return False
        lines = b"".join(map(_LINE.__mod__, headers))
        if cycle.scope["method"] == "HEAD" or lines.count(b"\n") != len(headers):
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[status], lines, body))
        cycle.message_event.set()
        cycle.on_response()
        return True


class StreamingProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the short way and the limits that the module describes."""

    _unfinished = 0
    """Bytes read since the last bytes that ended a head or belonged to a body."""
    _head_since: float | None = None
    """Loop time at which the connection or an incomplete head began; ``None`` if none is waited
    for."""
    _unread_since: float | None = None
    """Loop time at which a body was first seen that still comes after the reply to its request."""

    def data_received(self, data: bytes) -> None:
        self._unfinished += len(data)
        begins = self.cycle is None or not self.cycle.more_body
        if begins:
            if self._head_since is None:
                self._head_since = self.loop.time()
            if (
                data.find(b"pgrade:", 0, _HEADERS_REACH) >= 0
                or data.find(b"PGRADE:", 0, _HEADERS_REACH) >= 0
            ):
                headers, end, rest = data.partition(b"\r\n\r\n")
                data = _OFFER.sub(b"", headers + end[:2]) + end[2:] + rest
        super().data_received(data)
        if self._unfinished > _WITHOUT_END and not self.transport.is_closing():
            self._refuse(431 if begins else None, "head")

    def on_headers_complete(self) -> None:
        self._unfinished = 0
        self._head_since = None
        super().on_headers_complete()
        self.headers = []  # the request has the list; what comes yet are trailers

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: the client gets a 426, and Codex asks at each start."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        outbox = _OUTBOXES.get(self.server_state)
        if outbox is None:
            outbox = _OUTBOXES[self.server_state] = Outbox(self.loop)
        self._outbox = outbox
        self._accept_others()
        limits: ConnectionLimits | None = getattr(self.app, "connection_limits", None)
        if limits is None:
            return
        self._head_since = self.loop.time()
        if len(self.connections) > limits.connections:
            self._refuse(503, "connections")
        elif len(self.connections) == 1:
            self.loop.call_later(_LOOK_S, _look, self.loop, self.connections, limits)

    def _accept_others(self) -> None:
        """Accept the connections that wait at the application's listener."""
        listener: socket.socket | None = getattr(self.app, "listener", None)
        if listener is None:
            return
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                waiting, _ = listener.accept()
            except OSError:  # Nobody waits, or the server itself meets the error and logs it.
                return
            waiting.setblocking(False)
            task = self.loop.create_task(self._connect(waiting, listener))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _connect(self, accepted: socket.socket, listener: socket.socket) -> None:
        """Serve another connection to the same server, unless the server has begun to stop."""
        if listener.fileno() < 0:
            accepted.close()
            return
        made = partial(type(self), self.config, self.server_state, self.app_state, self.loop)
        await self.loop.connect_accepted_socket(made, accepted)

    def look(self, now: float, limits: ConnectionLimits) -> None:
        """End the connection if its client takes too long."""
        if self._head_since is not None:
            if now - self._head_since > limits.head_timeout_s:
                self._refuse(408, "head_timeout_s")
        elif self.cycle is not None and self.cycle.response_complete and self.cycle.more_body:
            if self._unread_since is None:
                self._unread_since = now
            elif now - self._unread_since > limits.body_timeout_s:
                self._refuse(None, "body_timeout_s")
        else:
            self._unread_since = None

    def _refuse(self, status: int | None, limit: str) -> None:
        """Close the connection, after a response with ``status`` unless that is ``None``."""
        if self.transport.is_closing():
            return
        if status is not None:
            self.transport.write(STATUS_LINE[status] + b"connection: close\r\n\r\n")
        self.transport.close()
        limits: ConnectionLimits | None = getattr(self.app, "connection_limits", None)
        if limits is not None:
            limits.reached(limit)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        scope: dict[str, Any] = cycle.scope  # type: ignore[assignment]
        scope["extensions"] = {EXTENSION: ShortWay(cycle, self._outbox)}
        super()._start_asgi_task(cycle, app)


def _look(loop: asyncio.AbstractEventLoop, connections: set[Any], limits: ConnectionLimits) -> None:
    """Check all connections of a server, and repeat this while there are any."""
    now = loop.time()
    for connection in list(connections):
        connection.look(now, limits)
    if connections:
        loop.call_later(_LOOK_S, _look, loop, connections, limits)


_OUTBOXES: Final[WeakKeyDictionary[ServerState, Outbox]] = WeakKeyDictionary()
"""One outbox for each server, which has one event loop."""
