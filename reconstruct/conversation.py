"""Conversations from the new messages of each call, and what else a call was asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bridle.store.reading.conversation import ReplyId, lineage_of, walk_back
from bridle.store.reading.queries import CallRow
from bridle.store.records import Message

ChatMessage = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A chat message of a conversation."""

    message: ChatMessage
    reply: ReplyId | None = None
    """The reply as which it was sampled; ``None`` for a message that the harness sent."""


def whole_conversation(calls: Mapping[str, CallRow], last: ReplyId) -> tuple[RecordedMessage, ...]:
    """Return the messages up to and including one reply.

    Raise :class:`bridle.store.reading.conversation.IncompleteConversation` if any are not known.
    """
    pieces: list[list[RecordedMessage]] = []
    for call, asked, reply in walk_back(last, calls.get):
        piece = [RecordedMessage(message.to_chat()) for message in asked.tail]
        pieces.append([*piece, RecordedMessage(call.replies[reply.choice].to_chat(), reply)])
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
    """Return whether a message has a part that is not text.

    Such a part is an image, sound, a file, or one of a type that is not known here.
    """
    parts = message.content if isinstance(message.content, list) else ()
    return any(part.get("type", "text") not in _TEXT_PARTS for part in parts)


def first_reply(call: CallRow) -> Message:
    """Return the first choice's message, or an empty one if the call has no reply."""
    return call.replies[0] if call.replies else Message("assistant")


def digests(call: CallRow) -> tuple[bytes, bytes]:
    """Return digests of the call's instructions and of its tools. Equal ones have equal digests."""
    lineage = lineage_of(call)
    return (b"", b"") if lineage is None else (lineage.digests.system, lineage.digests.tools)
