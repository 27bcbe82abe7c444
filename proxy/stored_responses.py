"""``previous_response_id``: the stored conversation that a Responses request goes on from."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from typing import Final

import msgspec

from proxy.canonical import ApiError, Message, Request
from proxy.dialects.responses_request import ResponsesContext, own_messages
from proxy.lineage import message_from_chat
from proxy.minting import call_id_of
from proxy.stored_items import StoredItems
from store.errors import NotFound
from store.queries import Reader

_CAPACITY: Final = 256


def begins_with_instructions(request: Request) -> bool:
    """Whether the first message is a Responses request's ``instructions``."""
    return isinstance(request.context, ResponsesContext) and request.context.instructions


class StoredResponses:
    """Recorded conversations by the response that ended them; the latest stay in memory."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._items = StoredItems(reader)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        """Call id -> its conversation; written by the threads that read the store."""

    async def expand(self, request: Request, body: bytes) -> Request:
        """``request`` (which came as ``body``) with the items that it names, and with the stored
        conversation before its own messages.

        Earlier ``instructions`` are not inherited, as with the provider. Raises :class:`ApiError`
        (404) when an item or the response is not stored here.
        """
        request = await self._items.expand(request, body)
        response_id = request.previous_response_id
        if response_id is None:
            return request
        call_id = call_id_of(response_id)
        stored = None if call_id is None else await asyncio.to_thread(self._read, call_id)
        if stored is None:
            raise ApiError(
                "not_found",
                f"Previous response with id '{response_id}' not found.",
                status=404,
                param="previous_response_id",
            )
        own = own_messages(request)
        instructions = request.messages[: len(request.messages) - len(own)]
        return msgspec.structs.replace(request, messages=(*instructions, *stored, *own))

    def _read(self, call_id: str) -> tuple[Message, ...] | None:
        with self._lock:
            return self._conversation(call_id)

    def _conversation(self, call_id: str) -> tuple[Message, ...] | None:
        """The messages up to and with the reply of ``call_id``, without instructions."""
        pieces: list[tuple[Message, ...]] = []
        at: str | None = call_id
        choice = 0
        while at is not None:
            known = self._known.get(at) if choice == 0 else None
            if known is not None:
                self._known.move_to_end(at)
                pieces.append(known)
                break
            try:
                row = self._reader.call(at)
            except NotFound:
                return None
            replies = [row.message, *row.conversation.get("choices", ())]
            if not row.message or choice >= len(replies):
                return None
            tail = [message_from_chat(message) for message in row.conversation.get("tail", ())]
            lineage = row.conversation.get("lineage", {})
            at = lineage.get("base")
            if at is None and row.conversation.get("instructions"):
                tail = tail[1:]
            pieces.append((*tail, message_from_chat(replies[choice])))
            choice = lineage.get("choice", 0)
        whole = tuple(message for piece in reversed(pieces) for message in piece)
        self._known[call_id] = whole
        while len(self._known) > _CAPACITY:
            self._known.popitem(last=False)
        return whole
