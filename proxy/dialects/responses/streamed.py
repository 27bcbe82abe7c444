"""A whole response as the stream of events that has the same items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.sse import event_bytes
from bridle.proxy.wire.canonical import Request

_FIELDS: Final[Mapping[str, str]] = {
    "arguments": "response.function_call_arguments",
    "input": "response.custom_tool_call_input",
}
"""The events of an item's field that comes in pieces."""
_PARTS: Final[Mapping[str, tuple[str, str, str]]] = {
    "output_text": ("response.output_text", "text", "response.content_part"),
    "refusal": ("response.refusal", "refusal", "response.content_part"),
    "reasoning_text": ("response.reasoning_text", "text", "response.content_part"),
    "summary_text": (
        "response.reasoning_summary_text",
        "text",
        "response.reasoning_summary_part",
    ),
}
"""The events of a part's text, its field, and the events of the part itself, by its type."""


def stream(request: Request, response: Json) -> bytes:
    """Return the server-sent events of ``response``."""
    events = (event | {"sequence_number": at} for at, event in enumerate(_events(response)))
    return b"".join(map(event_bytes, events))


def _events(response: Json) -> Iterator[Json]:
    begun = response | {"status": "in_progress", "output": [], "usage": None}
    begun |= {"completed_at": None} if "completed_at" in response else {}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response.get("output") or ()):
        at = {"output_index": index}
        yield {"type": "response.output_item.added", **at, "item": _begun(item)}
        yield from _pieces(item, {"item_id": item.get("id"), **at})
        yield {"type": "response.output_item.done", **at, "item": item}
    yield {"type": f"response.{response.get('status', 'completed')}", "response": response}


def _begun(item: Json) -> Json:
    """Return the item without what its events have."""
    empty: Json = {name: "" for name in _FIELDS if isinstance(item.get(name), str)}
    empty |= {name: [] for name in ("summary", "content") if isinstance(item.get(name), list)}
    empty |= {"status": "in_progress"} if "status" in item else {}
    return item | empty


def _pieces(item: Json, at: Json) -> Iterator[Json]:
    for name, kind in _FIELDS.items():
        if isinstance(text := item.get(name), str):
            yield {"type": f"{kind}.delta", **at, "delta": text}
            yield {"type": f"{kind}.done", **at, name: text}
    for name in ("summary", "content"):
        parts: Any = item.get(name)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            if part.get("type") in _PARTS:
                yield from _part(part, at | {f"{name}_index": index})


def _part(part: Json, at: Json) -> Iterator[Json]:
    kind, field, whole = _PARTS[part["type"]]
    logprobs = {"logprobs": part.get("logprobs") or []} if part["type"] == "output_text" else {}
    yield {"type": f"{whole}.added", **at, "part": part | {field: ""}}
    yield {"type": f"{kind}.delta", **at, "delta": part[field], **logprobs}
    yield {"type": f"{kind}.done", **at, field: part[field], **logprobs}
    yield {"type": f"{whole}.done", **at, "part": part}
