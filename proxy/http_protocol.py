"""uvicorn's HTTP protocol with a short way for the chunks of a stream that has begun.

ASGI's ``send`` is a coroutine that takes a dictionary and looks again at everything it knows of the
response: for a chunk of 200 bytes that costs more than all that the proxy does with it. The scope
therefore offers a :class:`ShortWay` as :data:`EXTENSION`; whoever does not find it there sends as
usual.

Chunks that are handed over in one turn of the event loop go to their sockets at its end, one after
the other. Going back and forth between Python and the kernel's network for each of them costs a
tenth more, by which at hundreds of streams all of them wait for the processor.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

EXTENSION: Final = "bridle.short_way"
"""In ``scope["extensions"]``."""

_FULL: Final = 1 << 18
"""Bytes that are not held until the end of the turn."""


class Outbox:
    """What is to be written at the end of this turn of one server's event loop."""

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
    """For one response."""

    __slots__ = ("_cycle", "_outbox", "flush")

    def __init__(self, cycle: RequestResponseCycle, outbox: Outbox) -> None:
        self._cycle = cycle
        self._outbox = outbox
        self.flush = outbox.flush
        """To be called before anything is sent the usual way, so that nothing overtakes."""

    def write(self, chunk: bytes) -> bool:
        """Whether ``chunk`` (not empty) goes this way: not when the response has not begun or is no
        chunked one, nor when its client must be waited for or has gone."""
        cycle = self._cycle
        if not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected:
            return False
        self._outbox.put(cycle.transport, b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True


class StreamingProtocol(HttpToolsProtocol):
    """See the module."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        outbox = _OUTBOXES.get(self.server_state)
        if outbox is None:
            outbox = _OUTBOXES[self.server_state] = Outbox(self.loop)
        scope: dict[str, Any] = cycle.scope  # type: ignore[assignment]
        scope["extensions"] = {EXTENSION: ShortWay(cycle, outbox)}
        super()._start_asgi_task(cycle, app)


_OUTBOXES: Final[WeakKeyDictionary[ServerState, Outbox]] = WeakKeyDictionary()
"""One for each server, which has one event loop."""
