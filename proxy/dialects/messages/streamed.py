"""A whole message as the stream of events that has the same content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.sse import event_bytes
from bridle.proxy.wire.canonical import Request

_TEXTS: Final = ("thinking", "signature", "text")
"""Fields of a block that come in pieces; the delta's type is named after its field."""


def stream(request: Request, message: Json) -> bytes:
    """Return the server-sent events of ``message``."""
    return b"".join(map(event_bytes, _events(message)))


def _events(message: Json) -> Iterator[Json]:
    end = {name: message.get(name) for name in ("stop_reason", "stop_sequence")}
    end |= {name: message[name] for name in ("stop_details", "container") if name in message}
    begun = message | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(message.get("content") or ()):
        at = {"index": index}
        deltas = list(_deltas(block))
        yield {"type": "content_block_start", **at, "content_block": _begun(block)}
        for delta in deltas:
            yield {"type": "content_block_delta", **at, "delta": delta}
        yield {"type": "content_block_stop", **at}
    yield {"type": "message_delta", "delta": end, "usage": message.get("usage") or {}}
    yield {"type": "message_stop"}


def _begun(block: Json) -> Json:
    """Return the block without what its deltas have."""
    empty: Json = {name: "" for name in _TEXTS if isinstance(block.get(name), str)}
    if isinstance(block.get("input"), dict):
        empty["input"] = {}
    if block.get("citations"):
        empty["citations"] = []
    return block | empty


def _deltas(block: Json) -> Iterator[Json]:
    for name in _TEXTS:
        if isinstance(text := block.get(name), str) and text:
            yield {"type": f"{name}_delta", name: text}
    for citation in block.get("citations") or ():
        yield {"type": "citations_delta", "citation": citation}
    if given := block.get("input"):
        yield {"type": "input_json_delta", "partial_json": json.dumps(given)}
