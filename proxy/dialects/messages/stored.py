"""The recorded conversation that the ``thread`` of a Messages request continues."""

from __future__ import annotations

from bridle.proxy.dialects.dialect import Readable
from bridle.proxy.dialects.messages.request import with_history
from bridle.proxy.dialects.messages.thread import thread_not_found
from bridle.proxy.dialects.responses.stored import ANSWERED, StoredResponses
from bridle.proxy.wire.canonical import Request
from bridle.store.reading.queries import CallRow


class StoredThreads(StoredResponses):
    """Recorded replies that a thread continues. It inherits their instructions and tools."""

    dialect = "messages"
    prefix = "msg"

    def is_gone(self, call: CallRow) -> bool:
        return super().is_gone(call) or call.status not in ANSWERED

    async def expand(self, request: Request, body: bytes, readable: Readable) -> Request:
        previous = request.previous_response_id or ""
        call = await self.find(previous)
        if call is None or not readable(call.session_id) or call.conversation is None:
            raise thread_not_found(previous)
        history = await self.conversation(call)
        if history is None:
            raise thread_not_found(previous)
        return with_history(body, history, tuple(dict(tool) for tool in call.conversation.tools))
