"""Conversation objects of Responses, as a fold of the recorded calls that name them.

Each request that changes a conversation is recorded as a call with a note: its creation, an update,
items that were added or deleted, and each response that went on with it. All are calls of one
session. The state is read from them once, and after that only from the session's new calls, so that
a restarted proxy and another process on the store know the same conversation.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import orjson

from bridle.proxy.dialects.body import Json, convert, decode, invalid
from bridle.proxy.dialects.dialect import Readable
from bridle.proxy.dialects.responses.input_items import given_items, written_items
from bridle.proxy.wire.canonical import ApiError
from bridle.proxy.wire.minting import call_id_of
from bridle.store.errors import NotFound
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallStatus, Note

NOTE: Final = "conversation"
"""The note on a call that is part of a conversation: what it does, the conversation, and the item
that it deletes."""
_PREFIX: Final = "conv_"
_KEPT: Final = 256
"""Maximum conversations in memory."""
_MOST_ITEMS: Final = 20
"""Maximum items that one request may add."""


class _Created(msgspec.Struct):
    items: list[Json] | None = None
    metadata: dict[str, str] | None = None


class _Updated(msgspec.Struct):
    metadata: dict[str, str] | None


class _Added(msgspec.Struct):
    items: list[Json]


class _Named(msgspec.Struct):
    id: str


class ConversationState:
    """One conversation, as the calls that were read say."""

    def __init__(self, identifier: str, session_id: str) -> None:
        self.id = identifier
        self.session_id = session_id
        self.created_at = 0
        self.metadata: Mapping[str, str] = {}
        self.items: dict[str, Json] = {}
        """The items in their order, by id."""
        self.deleted = False
        self.read: set[str] = set()
        """The calls of the session that were read."""

    def shown(self) -> bytes:
        shown = {"id": self.id, "object": "conversation", "created_at": self.created_at}
        return orjson.dumps(shown | {"metadata": self.metadata})


def note(action: str, identifier: str, item: str = "") -> Note:
    """Return the note on a call that does ``action``."""
    return Note(NOTE, f"{action} {identifier} {item}".rstrip())


def conversation_id(call_id: str) -> str:
    return _PREFIX + call_id.removeprefix("call_")


def named_conversation(value: Any) -> str | None:
    """Return the id in a request's field ``conversation``, an id or an object with one."""
    if value is None or isinstance(value, str):
        return value
    return convert(value, _Named, "conversation").id


def creating_call(identifier: str) -> str | None:
    return call_id_of(identifier) if identifier.startswith(_PREFIX) else None


def checked(action: str, body: bytes) -> None:
    """Raise :class:`ApiError` (400) if the body is not one of an ``action``."""
    kinds: Mapping[str, type[Any]] = {"create": _Created, "update": _Updated, "add": _Added}
    fields = decode(body or b"{}")
    wire = convert(fields, kinds[action])
    for index, item in enumerate(items := getattr(wire, "items", None) or ()):
        if not isinstance(item.get("type") or item.get("role"), str):
            raise invalid(f"items[{index}].type", "is required")
        if index >= _MOST_ITEMS:
            raise invalid(
                "items", f"at most {_MOST_ITEMS} items are added at once, not {len(items)}"
            )


def unknown(identifier: str) -> ApiError:
    """Return the error for a conversation that is not stored for the client."""
    return ApiError("not_found", f"Conversation with id '{identifier}' not found.", status=404)


def unknown_item(item: str) -> ApiError:
    return ApiError("not_found", f"Item with id '{item}' not found.", status=404)


def added_items(body: bytes, call_id: str) -> list[Json]:
    """Return the items that a call adds, as lists of items have them."""
    given = orjson.loads(body or b"{}").get("items") or []
    return list(given_items({"input": given}, call_id.removeprefix("call_")))


class StoredConversations:
    """The conversations of a store. Its methods block and may be called by several threads."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._states: OrderedDict[str, ConversationState] = OrderedDict()

    def find(self, identifier: str, readable: Readable) -> ConversationState:
        """Return a conversation.

        Raise :class:`ApiError` (404) if there is none for this client, or if it was deleted.
        """
        with self._lock:
            state = self._state(identifier)
            if not readable(state.session_id):
                raise unknown(identifier)
            self._read_on(state)
            if state.deleted:
                raise unknown(identifier)
            return state

    def _state(self, identifier: str) -> ConversationState:
        known = self._states.get(identifier)
        if known is not None:
            self._states.move_to_end(identifier)
            return known
        call_id = creating_call(identifier)
        if call_id is None or conversation_id(call_id) != identifier:
            raise unknown(identifier)
        try:
            row = self._reader.call(call_id)
        except NotFound:
            raise unknown(identifier) from None
        if note("create", identifier) not in row.notes:
            raise unknown(identifier)
        state = self._states[identifier] = ConversationState(identifier, row.session_id)
        while len(self._states) > _KEPT:
            self._states.popitem(last=False)
        return state

    def _read_on(self, state: ConversationState) -> None:
        """Read the calls of the conversation's session that were not read before."""
        new = [one for one in self._reader.call_ids(state.session_id) if one not in state.read]
        for call_id in new:
            row = self._reader.call(call_id)
            if row.status is CallStatus.OPEN:
                continue
            state.read.add(call_id)
            for one in row.notes:
                action, _, rest = one.detail.partition(" ")
                name, _, item = rest.partition(" ")
                if one.name == NOTE and name == state.id:
                    self._apply(state, row, action, item)

    def _apply(self, state: ConversationState, row: CallRow, action: str, item: str) -> None:
        if action == "delete":
            state.deleted = True
        elif action == "remove":
            state.items.pop(item, None)
        elif action == "respond":
            if row.status in (CallStatus.COMPLETE, CallStatus.QUARANTINED):
                self._add(state, self._exchanged(row))
        else:
            body = self._reader.request_body(row.id)
            given = orjson.loads(body or b"{}")
            if action == "create":
                state.created_at = int(row.started_at)
            if action in ("create", "update"):
                state.metadata = given.get("metadata") or {}
            self._add(state, added_items(body, row.id))

    def _exchanged(self, row: CallRow) -> list[Json]:
        """Return the items that a response was asked with, and those of its reply."""
        body = orjson.loads(self._reader.request_body(row.id))
        asked = given_items(body, f"resp_{row.id.removeprefix('call_')}")
        return [*asked, *map(dict, written_items(self._reader.response_body(row.id)).values())]

    def _add(self, state: ConversationState, items: Sequence[Json]) -> None:
        for item in items:
            state.items[item["id"]] = item
