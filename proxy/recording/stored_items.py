"""``item_reference``: the recorded output items that a Responses request only names.

A client whose responses are stored may send an item's id instead of the item. The reference is
replaced by the exact JSON of the item that the client was sent. A request with references is
therefore the same conversation as a request with whole items.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from bridle.proxy.dialects.responses.request import parse_with
from bridle.proxy.wire.canonical import ApiError, Request
from bridle.proxy.wire.minting import call_id_of
from bridle.proxy.wire.sse import SseParser
from bridle.store.errors import NotFound
from bridle.store.reading.queries import CallRow, Reader

NOT_STORED: Final = "response_not_stored"
DELETED: Final = "response_deleted"
_GONE: Final = frozenset({NOT_STORED, DELETED})
_CAPACITY: Final = 4096
_ITEM_DONE: Final = b'{"type":"response.output_item.done",'

Items = Mapping[str, Mapping[str, Any]]
Readable = Callable[[str], bool]
"""A function that takes a session's id and returns True if the client may read its recorded
items."""


def is_gone(call: CallRow) -> bool:
    """Whether the call's response is not stored for clients, or was deleted by one."""
    return any(note.name in _GONE for note in call.notes)


class StoredItems:
    """Output items of recorded responses by their ids; the latest calls' stay in memory."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[str, Items]] = OrderedDict()
        """The session and the items of each call, by call id; written by the threads that read the
        store."""

    async def expand(self, request: Request, body: bytes, readable: Readable) -> Request:
        """Return ``request``. If it has references, return ``body`` parsed anew with the items in
        their place.

        Raises :class:`ApiError` (404) if an item is not stored here, or not for this client.
        """
        references = request.responses.references
        if not references:
            return request
        return parse_with(body, await asyncio.to_thread(self._items, references, readable))

    def forget(self, call_id: str) -> None:
        """Drop a call whose response was deleted."""
        with self._lock:
            self._known.pop(call_id, None)

    def _items(self, references: tuple[str, ...], readable: Readable) -> Items:
        with self._lock:
            return {reference: self._item(reference, readable) for reference in references}

    def _item(self, reference: str, readable: Readable) -> Mapping[str, Any]:
        call_id = call_id_of(reference)
        session_id, items = ("", {}) if call_id is None else self._of_call(call_id)
        if not readable(session_id):
            items = {}
        if reference not in items:
            raise ApiError(
                "not_found", f"Item with id '{reference}' not found.", status=404, param="input"
            )
        return items[reference]

    def _of_call(self, call_id: str) -> tuple[str, Items]:
        """Return the call's session and its items."""
        known = self._known.get(call_id)
        if known is not None:
            self._known.move_to_end(call_id)
            return known
        try:
            row = self._reader.call(call_id)
            if row.dialect != "responses" or row.response_sha256 is None or is_gone(row):
                return row.session_id, {}
            found = row.session_id, _written(self._reader.response_body(row.id))
        except NotFound:
            return "", {}
        self._known[call_id] = found
        while len(self._known) > _CAPACITY:
            self._known.popitem(last=False)
        return found


def _written(response: bytes) -> Items:
    """Return the completed items in a response's bytes, streamed or not; an error has none."""
    if response.startswith(b"{"):
        return {item["id"]: item for item in orjson.loads(response).get("output", ())}
    events = SseParser()
    payloads = events.feed(response) + events.finish()
    done = (orjson.loads(payload)["item"] for payload in payloads if payload.startswith(_ITEM_DONE))
    return {item["id"]: item for item in done}
