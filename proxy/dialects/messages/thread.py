"""``thread``: a conversation that the server holds, of which a client sends only the new messages.

``{"type": "create"}`` changes nothing, because every conversation is recorded.
``{"type": "continue", "previous_message_id": …}`` takes history, instructions and tools from the
record. The official SDKs send the whole history again when they get one of the error codes here.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from bridle.proxy.dialects.body import Json
from bridle.proxy.wire.canonical import ApiError

_OF_THE_THREAD: Final = ("system", "tools")
"""Fields that a request which continues a thread takes from the thread."""


class Thread(msgspec.Struct, gc=False):
    """The request's field ``thread``."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


def continued_message(thread: Thread | None, fields: Json) -> str | None:
    """Return the id of the message that the request continues, if it continues one.

    ``fields`` are the fields of the request.

    Raise :class:`ApiError` (400) when it asks for something that a thread cannot have.
    """
    if thread is None or thread.type == "create":
        return None
    if thread.previous_message_id is None:
        raise thread_not_found("without 'previous_message_id'")
    unsupported = [name for name in _OF_THE_THREAD if fields.get(name)]
    if not fields.get("messages"):
        unsupported.append("messages")
    if unsupported:
        raise thread_unsupported(unsupported)
    return thread.previous_message_id


def thread_not_found(message_id: str) -> ApiError:
    """Return the error for a message that is not recorded here, or not for this client."""
    return ApiError(
        "invalid_request",
        f"thread.previous_message_id: no message {message_id} to continue; send the whole history",
        status=400,
        param="thread",
        details={"error_code": "thread_not_found"},
    )


def thread_unsupported(names: list[str]) -> ApiError:
    return ApiError(
        "invalid_request",
        f"thread: cannot be continued with this {' and '.join(names)}; send the whole history "
        "without 'thread'",
        status=400,
        param="thread",
        details={"error_code": "thread_unsupported_request", "unsupported": names},
    )
