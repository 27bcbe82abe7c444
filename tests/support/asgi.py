"""The receiving end of ASGI applications that stand in for servers."""

from __future__ import annotations

from typing import Any


async def read_body(receive: Any) -> bytes:
    """Return the whole body of a request."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body
