"""Recorded responses: continued by ``previous_response_id``, read, deleted, or named in parts.

Every call is recorded. A reply that a client deleted, or asked not to store, is hidden from clients
and stays in the record.

A client whose responses are stored may send an item's id (``item_reference``) instead of the item.
The reference is replaced by the exact JSON of the item that the client was sent. A request with
references is therefore the same conversation as a request with whole items.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import orjson

from bridle.proxy.dialects.dialect import Readable
from bridle.proxy.dialects.responses.conversations import StoredConversations
from bridle.proxy.dialects.responses.input_items import given_items, page, written_items
from bridle.proxy.dialects.responses.request import (
    NOT_STORED,
    ResponsesFields,
    parse_with,
    with_history,
    with_items,
)
from bridle.proxy.wire.canonical import ApiError, Message, Request, prefilled
from bridle.proxy.wire.minting import call_id_of
from bridle.proxy.wire.sse import SseParser
from bridle.store.errors import NotFound
from bridle.store.reading.conversation import IncompleteConversation, ReplyId, base, walk_back
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallStatus, Note

DELETED: Final = Note("response_deleted")
ANSWERED: Final = frozenset({CallStatus.COMPLETE, CallStatus.QUARANTINED})
_GONE: Final = frozenset({NOT_STORED.name, DELETED.name})
_CONVERSATIONS: Final = 256
"""Maximum conversations in memory."""
_CALLS: Final = 4096
"""Maximum calls whose items are in memory."""
_UPSTREAM_IDS: Final = 16_384
"""Maximum ids of replies that an upstream made which are in memory."""
_LAST: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})

Items = Mapping[str, Mapping[str, Any]]


class _Event(msgspec.Struct):
    type: str
    response: msgspec.Raw = msgspec.Raw()


class StoredResponses:
    """Recorded responses, and their output items by id; the latest calls' are kept in memory."""

    dialect = "responses"
    prefix = "resp"
    """The prefix of the ids of responses."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.conversations = StoredConversations(reader)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        """The conversation of each call, by call id; written by the threads that read the store."""
        self._items: OrderedDict[str, tuple[str, Items]] = OrderedDict()
        """The session and the items of each call, by call id; written by the threads that read the
        store."""
        self._upstream_ids: OrderedDict[str, str] = OrderedDict()
        """The calls whose replies have ids of the upstream's own, by these ids."""

    async def expand(self, request: Request, body: bytes, readable: Readable) -> Request:
        """Put recorded items for references, and the recorded conversation before the input.

        The items take the place of the references. The conversation is put there without its
        ``instructions``. Those of a conversation object are its items.
        """
        own = request.own
        if isinstance(own, ResponsesFields) and own.conversation is not None:
            find = self.conversations.find
            state = await asyncio.to_thread(find, own.conversation, readable)
            body = with_items(body, list(state.items.values()))
            request = parse_with(body, {})
        if request.references:
            items = await asyncio.to_thread(self._named, request.references, readable)
            request = parse_with(body, items)
        previous = request.previous_response_id
        if previous is None:
            return request
        call = await self.find(previous)
        known = call is not None and readable(call.session_id)
        history = await self.conversation(call) if call and known else None
        if history is None:
            raise ApiError(
                "not_found",
                f"Previous response with id '{previous}' not found.",
                status=404,
                param="previous_response_id",
            )
        return with_history(request, history)

    async def whole(self, call: CallRow) -> bytes | None:
        if call.response_sha256 is None:
            return None
        body = await asyncio.to_thread(self._reader.response_body, call.id)
        if not call.stream:
            return body if call.status in ANSWERED else None
        parser = SseParser()
        for payload in reversed([*parser.feed(body), *parser.finish()]):
            event = msgspec.json.decode(payload, type=_Event)
            if event.type in _LAST and bytes(event.response):
                return bytes(event.response)
        return None

    async def inputs(self, call: CallRow, query: Mapping[str, str]) -> bytes:
        return await asyncio.to_thread(self._inputs, call, query)

    def unknown(self, response_id: str) -> ApiError:
        return ApiError("not_found", f"Response with id '{response_id}' not found.", status=404)

    @staticmethod
    def deleted(response_id: str) -> bytes:
        return orjson.dumps({"id": response_id, "object": "response", "deleted": True})

    def forget(self, call_id: str) -> None:
        with self._lock:
            self._items.pop(call_id, None)
            self._known.pop(call_id, None)

    def keep(self, upstream_id: str, call_id: str) -> None:
        self._upstream_ids[upstream_id] = call_id
        while len(self._upstream_ids) > _UPSTREAM_IDS:
            self._upstream_ids.popitem(last=False)

    async def find(self, response_id: str) -> CallRow | None:
        call_id = self._upstream_ids.get(response_id) or call_id_of(response_id)
        minted = call_id and f"{self.prefix}_{call_id.removeprefix('call_')}"
        if call_id is None or (response_id != minted and response_id not in self._upstream_ids):
            return None
        try:
            call = await asyncio.to_thread(self._reader.call, call_id)
        except NotFound:
            return None
        return None if self.is_gone(call) else call

    def is_gone(self, call: CallRow) -> bool:
        """Return whether the reply of the call is gone for this dialect's clients.

        It is gone if it is another dialect's, is not stored for clients, or was deleted by one.
        """
        return call.dialect != self.dialect or any(note.name in _GONE for note in call.notes)

    async def conversation(self, call: CallRow) -> tuple[Message, ...] | None:
        """Return the messages up to and including the call's reply.

        Instructions that a continuation does not inherit are left out. Return ``None`` if a part of
        the messages is not stored.
        """
        return await asyncio.to_thread(self._locked, call.id)

    def _locked(self, call_id: str) -> tuple[Message, ...] | None:
        with self._lock:
            return self._conversation(call_id)

    def _conversation(self, call_id: str) -> tuple[Message, ...] | None:
        """Return the messages up to the reply of ``call_id`` and the reply, without instructions.

        Return ``None`` if a part of them is not stored.
        """
        if call_id in self._known:
            self._known.move_to_end(call_id)
            return self._known[call_id]
        pieces: list[tuple[Message, ...]] = []
        try:
            for row, asked, reply in walk_back(ReplyId(call_id, 0), self._reader.call):
                above, tail, said = base(row), asked.tail, row.replies[reply.choice]
                if above is None and asked.instructions:
                    tail = tail[1:]
                prefill = "" if asked.lineage is None else asked.lineage.digests.prefill
                if prefill:
                    tail, said = tail[:-1], prefilled(said, prefill)
                pieces.append((*tail, said))
                if above is not None and above.choice == 0 and above.call_id in self._known:
                    self._known.move_to_end(above.call_id)
                    pieces.append(self._known[above.call_id])
                    break
        except (IncompleteConversation, NotFound):
            return None
        whole = tuple(message for piece in reversed(pieces) for message in piece)
        self._known[call_id] = whole
        while len(self._known) > _CONVERSATIONS:
            self._known.popitem(last=False)
        return whole

    def _inputs(self, call: CallRow, query: Mapping[str, str]) -> bytes:
        """Return the page of the call's input, after the conversation that it continues."""
        found: list[dict[str, Any]] = []
        previous: str | None = call.id
        with self._lock:
            while previous is not None:
                body = orjson.loads(self._reader.request_body(previous))
                response_id = f"{self.prefix}_{previous.removeprefix('call_')}"
                found[:0] = [self._resolved(item) for item in given_items(body, response_id)]
                previous = call_id_of(body.get("previous_response_id") or "")
                if previous is not None:
                    found[:0] = map(dict, self._of_call(previous)[1].values())
        return page(found, query)

    def _resolved(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return the recorded item that a reference names."""
        call_id = call_id_of(item["id"]) if item["type"] == "item_reference" else None
        known = {} if call_id is None else self._of_call(call_id)[1]
        return dict(known.get(item["id"], item))

    def _named(self, references: tuple[str, ...], readable: Readable) -> Items:
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
        known = self._items.get(call_id)
        if known is not None:
            self._items.move_to_end(call_id)
            return known
        try:
            row = self._reader.call(call_id)
            if row.response_sha256 is None or self.is_gone(row):
                return row.session_id, {}
            found = row.session_id, written_items(self._reader.response_body(row.id))
        except NotFound:
            return "", {}
        self._items[call_id] = found
        while len(self._items) > _CALLS:
            self._items.popitem(last=False)
        return found
