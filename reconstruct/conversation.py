"""Conversations, put together from the new messages of each call.

For each call, the store keeps the messages after the reply that it continues (its base), its tools,
and digests of its instructions and tools. Without a base, these messages are the whole
conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from bridle.errors import BridleError
from bridle.store.reading.queries import CallRow
from bridle.store.records import LineageState, Message

ChatMessage = Mapping[str, Any]


class ReplyId(NamedTuple):
    """One sampled reply: a choice of a call."""

    call_id: str
    choice: int


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A chat message of a conversation."""

    message: ChatMessage
    reply: ReplyId | None = None
    """The reply as which it was sampled; ``None`` for a message that the harness sent."""


class IncompleteConversation(BridleError, ValueError):
    """The messages of a call were not recorded, or a call that it continues is missing."""


def whole_conversation(calls: Mapping[str, CallRow], last: ReplyId) -> tuple[RecordedMessage, ...]:
    """Return the messages up to and including one reply. Raise :class:`IncompleteConversation` if
    any are not known."""
    pieces: list[list[RecordedMessage]] = []
    seen: set[str] = set()
    reply: ReplyId | None = last
    while reply is not None:
        call = calls.get(reply.call_id)
        asked = None if call is None else call.conversation
        if call is None or asked is None or call.id in seen or reply.choice >= len(call.replies):
            raise IncompleteConversation(f"the messages of call {reply.call_id} are not known")
        seen.add(call.id)
        piece = [RecordedMessage(message.to_chat()) for message in asked.tail]
        pieces.append([*piece, RecordedMessage(call.replies[reply.choice].to_chat(), reply)])
        reply = base(call)
    return tuple(message for piece in reversed(pieces) for message in piece)


def new_messages(call: CallRow) -> Sequence[Message]:
    """Return the messages after the base's reply, or none if they were not recorded."""
    return () if call.conversation is None else call.conversation.tail


def tools(call: CallRow) -> tuple[Mapping[str, Any], ...]:
    """Return the definitions of the call's tools."""
    return () if call.conversation is None else call.conversation.tools


def texts(messages: Iterable[Message], *roles: str) -> Iterator[str]:
    """Yield the texts of the messages with these roles."""
    for message in messages:
        if message.role in roles:
            content = message.content
            parts = content if isinstance(content, list) else [{"text": content}]
            yield from (str(part["text"]) for part in parts if part.get("text"))


_TEXT_PARTS: Final = frozenset(
    {"text", "input_text", "output_text", "refusal", "thinking", "reasoning"}
)
"""Types of content parts that a model is shown as text."""


def holds_media(message: Message) -> bool:
    """Whether a message has a part that is not text: an image, sound, a file, or one of a type that
    is not known here."""
    parts = message.content if isinstance(message.content, list) else ()
    return any(part.get("type", "text") not in _TEXT_PARTS for part in parts)


def first_reply(call: CallRow) -> Message:
    """Return the first choice's message, or an empty one if the call has no reply."""
    return call.replies[0] if call.replies else Message("assistant")


def base(call: CallRow) -> ReplyId | None:
    """Return the reply that the call continues, if any. A bare prompt has none, because it repeats
    all of what it continues."""
    if completes_prompt(call):
        return None
    lineage = _lineage(call)
    if lineage is None:
        return None if call.parent_call_id is None else ReplyId(call.parent_call_id, 0)
    if lineage.base_call_id is None:
        return None
    return ReplyId(lineage.base_call_id, lineage.base_choice)


def completes_prompt(call: CallRow) -> bool:
    """Whether the call was asked with a bare prompt, not with messages."""
    asked = call.conversation
    return asked is not None and not asked.length and not asked.tail


def digests(call: CallRow) -> tuple[bytes, bytes]:
    """Return digests of the call's instructions and of its tools. Equal ones have equal digests."""
    lineage = _lineage(call)
    return (b"", b"") if lineage is None else (lineage.digests.system, lineage.digests.tools)


def repeats(call: CallRow) -> str | None:
    """Return the id of the call whose request this one sends again, or ``None``."""
    lineage = _lineage(call)
    return None if lineage is None else lineage.retry_of


def _lineage(call: CallRow) -> LineageState | None:
    return None if call.conversation is None else call.conversation.lineage
