"""The input items of a recorded response, as ``/v1/responses/{id}/input_items`` lists them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from bridle.proxy.dialects.body import Json, invalid
from bridle.proxy.wire.sse import SseParser

_LIMIT: Final = 20
"""Items of a page if the client asks for no other number."""
_LARGEST: Final = 100
_ITEM_DONE: Final = b'{"type":"response.output_item.done",'
_TEXT: Final = {"assistant": "output_text"}
"""The type of a message's text by its role, if it is not ``input_text``."""


def given_items(body: Json, response_id: str) -> Iterator[Json]:
    """Yield the input of a request, in the complete form that a list of items has.

    An item that the client sent without an id gets one that is made of ``response_id``.
    """
    given: Any = body.get("input") or ()
    items: Sequence[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for index, item in enumerate(items):
        kind = item.get("type") or "message"
        named = {"id": f"{kind}_{index:02d}_{response_id}", "status": "completed"}
        whole = named | {name: value for name, value in item.items() if value is not None}
        yield {"type": kind, **whole} if kind != "message" else _message(whole)


def _message(item: Json) -> Json:
    role, content = item.get("role", "user"), item.get("content")
    kind = _TEXT.get(role, "input_text")
    parts = [{"type": kind, "text": content}] if isinstance(content, str) else content or []
    if kind == "output_text":
        parts = [{"annotations": [], **part} for part in parts]
    return {**item, "type": "message", "content": parts}


def _distinct(items: Sequence[Json]) -> list[Json]:
    """Return the items, with another id for one that stands in the conversation again."""
    known: set[str] = set()
    distinct = []
    for index, item in enumerate(items):
        if item["id"] in known:
            item = {**item, "id": f"{item['id']}_{index:02d}"}
        known.add(item["id"])
        distinct.append(item)
    return distinct


def page(items: Sequence[Json], query: Mapping[str, str]) -> bytes:
    """Return one page of ``items``, which are in the order of the conversation.

    The ``query`` has ``limit``, ``order`` (``desc`` by default) and ``after``, the id of the last
    item of the page before. Raise ``ApiError`` (400) for other values.
    """
    limit, order = query.get("limit", str(_LIMIT)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= _LARGEST):
        raise invalid("limit", f"must be a number from 1 to {_LARGEST}")
    if order not in ("asc", "desc"):
        raise invalid("order", "must be 'asc' or 'desc'")
    items = _distinct(items)
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    ids = [item["id"] for item in ordered]
    if after is not None and after not in ids:
        raise invalid("after", f"no item has the id {after!r}")
    start = 0 if after is None else ids.index(after) + 1
    shown = ordered[start : start + int(limit)]
    more = start + len(shown) < len(ordered)
    ends = [shown[0]["id"], shown[-1]["id"]] if shown else [None, None]
    listed = {"first_id": ends[0], "last_id": ends[1], "has_more": more}
    return orjson.dumps({"object": "list", "data": shown, **listed})


def written_items(response: bytes) -> Mapping[str, Mapping[str, Any]]:
    """Return the completed items in a response's bytes, streamed or not; an error has none."""
    if response.startswith(b"{"):
        return {item["id"]: item for item in orjson.loads(response).get("output", ())}
    events = SseParser()
    payloads = events.feed(response) + events.finish()
    done = (orjson.loads(payload)["item"] for payload in payloads if payload.startswith(_ITEM_DONE))
    return {item["id"]: item for item in done}
