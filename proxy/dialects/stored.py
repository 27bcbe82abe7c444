"""Recorded replies to which a client's request refers by their ids.

Every call is recorded. A reply that a client deleted, or asked not to store, is hidden from clients
and stays in the record.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from bridle.proxy.wire.canonical import ApiError, Message, Request, prefilled
from bridle.proxy.wire.minting import call_id_of
from bridle.store.errors import NotFound
from bridle.store.reading.conversation import IncompleteConversation, ReplyId, base, walk_back
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallStatus, Note

NOT_STORED: Final = Note("response_not_stored")
"""The note on a call whose client asked not to store the reply."""
DELETED: Final = Note("response_deleted")
ANSWERED: Final = frozenset({CallStatus.COMPLETE, CallStatus.QUARANTINED})
_GONE: Final = frozenset({NOT_STORED.name, DELETED.name})
_CAPACITY: Final = 256

Readable = Callable[[str], bool]
"""A function that takes a session's id and returns True if the client may read its recorded
replies."""


class StoredReplies(ABC):
    """Recorded replies of one dialect; the latest conversations are kept in memory."""

    dialect: str
    """The name of the dialect."""
    prefix: str
    """The prefix of its response ids."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        """The conversation of each call, by call id; written by the threads that read the store."""

    @abstractmethod
    async def expand(self, request: Request, body: bytes, readable: Readable) -> Request:
        """Return ``request``, parsed from ``body``, with the recorded parts that it refers to.

        Raise :class:`ApiError` in the dialect's words if a part is not stored here, or not for this
        client.
        """

    async def whole(self, call: CallRow) -> bytes | None:
        """Return the reply as a client reads it later, or ``None`` if it was not sent completely.

        Override it for a dialect that has a path of ``STORED``.
        """
        return None

    def unknown(self, response_id: str) -> ApiError:
        """Return the error for a reply that is not stored for the client."""
        return ApiError("not_found", f"Response with id '{response_id}' not found.", status=404)

    @staticmethod
    def deleted(response_id: str) -> bytes:
        """Return the reply to the request that deleted a stored reply."""
        return b""

    def forget(self, call_id: str) -> None:
        """Drop a reply that was deleted."""
        with self._lock:
            self._known.pop(call_id, None)

    async def find(self, response_id: str) -> CallRow | None:
        """Return the call that made the reply.

        Return ``None`` if there is none or it is not stored for its client.
        """
        call_id = call_id_of(response_id)
        if call_id is None or response_id != f"{self.prefix}_{call_id.removeprefix('call_')}":
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
        while len(self._known) > _CAPACITY:
            self._known.popitem(last=False)
        return whole
