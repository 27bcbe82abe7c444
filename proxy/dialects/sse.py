"""Server-sent events as Anthropic and the Responses API write them."""

from __future__ import annotations

import orjson

from bridle.proxy.dialects.body import Json


def event_bytes(event: Json) -> bytes:
    """Return ``event`` as a server-sent event that has the name of its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))
