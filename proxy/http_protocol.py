"""uvicorn's HTTP protocol with a short way for the chunks of a stream that has begun.

ASGI's ``send`` is a coroutine that takes a dictionary and looks again at everything it knows of the
response: for a chunk of 200 bytes that costs more than all that the proxy does with it. The scope
therefore offers :data:`EXTENSION`; whoever does not find it there sends as usual.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION: Final = "bridle.write"
"""In ``scope["extensions"]``: a function that writes a chunk at once and says whether it did. It
does not when the response has not begun, is no chunked one, or the client must be waited for."""


class StreamingProtocol(HttpToolsProtocol):
    """See the module."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        scope: dict[str, Any] = cycle.scope  # type: ignore[assignment]
        scope["extensions"] = {EXTENSION: partial(_write, cycle)}
        super()._start_asgi_task(cycle, app)


def _write(cycle: RequestResponseCycle, chunk: bytes) -> bool:
    if not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
    return True
