"""Recorded replies that clients read, delete, or continue by their id.

A Responses request continues a reply by ``previous_response_id``, a Messages request by ``thread``.
Every call is recorded. A response that a client deleted, or asked not to store, is hidden from
clients and stays in the record.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import msgspec

from bridle.proxy.dialects.messages import request as messages_request
from bridle.proxy.dialects.messages.thread import thread_not_found
from bridle.proxy.dialects.responses.request import with_history
from bridle.proxy.recording.stored_items import DELETED, NOT_STORED, Readable, StoredItems, is_gone
from bridle.proxy.session.turn import prefilled
from bridle.proxy.wire.canonical import ApiError, DialectName, Message, Request
from bridle.proxy.wire.minting import call_id_of
from bridle.proxy.wire.sse import SseParser
from bridle.store.errors import NotFound
from bridle.store.reading.conversation import IncompleteConversation, ReplyId, base, walk_back
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallStatus, Note

_CAPACITY: Final = 256
_ANSWERED: Final = frozenset({CallStatus.COMPLETE, CallStatus.QUARANTINED})
_PREFIXES: Final[Mapping[DialectName, str]] = {"responses": "resp", "messages": "msg"}
"""The dialects whose replies can be continued by their id, with the prefix of the id."""
_LAST: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


class _Event(msgspec.Struct):
    type: str
    response: msgspec.Raw = msgspec.Raw()


def begins_with_instructions(request: Request) -> bool:
    """Whether the first message is a Responses request's ``instructions``."""
    return request.responses.instructions


def refers(request: Request) -> bool:
    """Whether a part of the request's conversation is in the record alone."""
    return request.previous_response_id is not None or bool(request.responses.references)


def not_stored(request: Request) -> tuple[Note, ...]:
    """Return the note on a call whose client sent ``store: false``."""
    return () if request.responses.store else (Note(NOT_STORED),)


def marked_deleted(call: CallRow) -> tuple[Note, ...]:
    """Return the call's notes with the note of the deletion."""
    return (*call.notes, Note(DELETED))


def unknown_response(response_id: str) -> ApiError:
    return ApiError("not_found", f"Response with id '{response_id}' not found.", status=404)


def _unknown_previous(response_id: str) -> ApiError:
    return ApiError(
        "not_found",
        f"Previous response with id '{response_id}' not found.",
        status=404,
        param="previous_response_id",
    )


class StoredResponses:
    """Recorded conversations by the response that ended them; the latest are kept in memory."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._items = StoredItems(reader)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        """The conversation of each call, by call id; written by the threads that read the store."""

    async def expand(self, request: Request, body: bytes, readable: Readable) -> Request:
        """Return ``request`` (parsed from ``body``) with the recorded parts that it refers to.

        References are replaced by the items, and the recorded conversation comes before the
        request's own messages. It comes without its ``instructions`` for a Responses request, which
        does not inherit them, and with its instructions and tools for a Messages request, which
        does.

        Raises :class:`ApiError` in the dialect's words if an item or the reply is not stored here,
        or not for this client.
        """
        if request.dialect == "responses":
            request = await self._items.expand(request, body, readable)
        previous = request.previous_response_id
        if previous is None:
            return request
        call = await self.find(previous, request.dialect)
        known = call is not None and readable(call.session_id)
        stored = await asyncio.to_thread(self._read, call.id) if call and known else None
        if request.dialect == "responses":
            if stored is None:
                raise _unknown_previous(previous)
            return with_history(request, stored)
        if call is None or stored is None or call.conversation is None:
            raise thread_not_found(previous)
        tools = tuple(dict(tool) for tool in call.conversation.tools)
        return messages_request.with_history(body, stored, tools)

    async def find(self, response_id: str, dialect: DialectName = "responses") -> CallRow | None:
        """Return the call that made the reply, or ``None`` if there is none or it is not stored for
        its client."""
        call_id = call_id_of(response_id)
        prefix = _PREFIXES[dialect]
        if call_id is None or response_id != f"{prefix}_{call_id.removeprefix('call_')}":
            return None
        try:
            call = await asyncio.to_thread(self._reader.call, call_id)
        except NotFound:
            return None
        gone = is_gone(call) or call.dialect != dialect
        return None if gone or (dialect == "messages" and call.status not in _ANSWERED) else call

    async def whole(self, call: CallRow) -> bytes | None:
        """Return the response object that the client was sent, or ``None`` if it was not sent
        completely."""
        if call.response_sha256 is None:
            return None
        body = await asyncio.to_thread(self._reader.response_body, call.id)
        if not call.stream:
            return body if call.status in _ANSWERED else None
        parser = SseParser()
        for payload in reversed([*parser.feed(body), *parser.finish()]):
            event = msgspec.json.decode(payload, type=_Event)
            if event.type in _LAST and bytes(event.response):
                return bytes(event.response)
        return None

    def forget(self, call_id: str) -> None:
        """Drop a response that was deleted."""
        self._items.forget(call_id)
        with self._lock:
            self._known.pop(call_id, None)

    def _read(self, call_id: str) -> tuple[Message, ...] | None:
        with self._lock:
            return self._conversation(call_id)

    def _conversation(self, call_id: str) -> tuple[Message, ...] | None:
        """Return the messages up to and including the reply of ``call_id``, without instructions,
        or ``None`` if a part of them is not stored."""
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
        while len(self._known) > _CAPACITY:
            self._known.popitem(last=False)
        return whole
