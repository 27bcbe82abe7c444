"""What a call was asked and what it continues; whole conversations put together from that.

This is the one module that reads ``calls.conversation``.

The proxy keeps with a call the chat messages that come after the reply that it continues (the
``tail``), the tools where they differ from that call's, digests of its instructions and tools, and
which reply it continues (its base; the parent call's where lineage recorded none). Without a base
the tail is the whole conversation. The first choice's reply is ``calls.message``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bridle.store.reading.queries import CallRow

Message = Mapping[str, Any]


class ReplyId(NamedTuple):
    """One sampled reply: a choice of a call."""

    call_id: str
    choice: int


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A chat message of a conversation."""

    message: Message
    reply: ReplyId | None = None
    """Where it was sampled; ``None`` for a message that the harness sent."""


class IncompleteConversation(ValueError):
    """The messages of a call were not recorded, or a call that it continues is missing."""


def conversation(
    calls: Mapping[str, CallRow], last: ReplyId
) -> tuple[tuple[RecordedMessage, ...], tuple[Mapping[str, Any], ...]]:
    """The messages up to and including one reply, and the tools.

    Raises :class:`IncompleteConversation`.
    """
    pieces: list[list[RecordedMessage]] = []
    tools: Sequence[Mapping[str, Any]] | None = None
    seen: set[str] = set()
    reply: ReplyId | None = last
    while reply is not None:
        call = calls.get(reply.call_id)
        asked = None if call is None else new_messages(call)
        if call is None or asked is None or call.id in seen or reply.choice >= len(replies(call)):
            raise IncompleteConversation(f"the messages of call {reply.call_id} are not known")
        seen.add(call.id)
        pieces.append([RecordedMessage(message) for message in asked])
        pieces[-1].append(RecordedMessage(replies(call)[reply.choice], reply))
        tools = own_tools(call) if tools is None else tools
        reply = base(call)
    return tuple(message for piece in reversed(pieces) for message in piece), tuple(tools or ())


def new_messages(call: CallRow) -> Sequence[Message] | None:
    """The messages after the base's reply; ``None`` when they were not recorded."""
    return call.conversation.get("tail")


def own_tools(call: CallRow) -> Sequence[Mapping[str, Any]] | None:
    """The call's tools; ``None`` where they are those of the call that it continues."""
    return call.conversation.get("tools")


def texts(messages: Iterable[Message], *roles: str) -> Iterator[str]:
    """The texts of the messages of these roles."""
    for message in messages:
        if message.get("role") not in roles:
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        yield from (str(part["text"]) for part in parts if part.get("text"))


def replies(call: CallRow) -> list[Message]:
    """The chat messages of all choices; empty when the call has no reply."""
    return [call.message, *call.conversation.get("choices", ())] if call.message else []


def base(call: CallRow) -> ReplyId | None:
    """The reply that the call continues; a bare prompt repeats all of what it continues."""
    if completes_prompt(call):
        return None
    lineage = call.conversation.get("lineage")
    if lineage is None:
        call_id, choice = call.parent_call_id, 0
    else:
        call_id, choice = lineage.get("base"), lineage.get("choice", 0)
    return None if call_id is None else ReplyId(call_id, choice)


def completes_prompt(call: CallRow) -> bool:
    """Whether the call was asked with a bare prompt, not with messages."""
    return call.dialect == "completions"


def offers_tools(call: CallRow) -> bool:
    """Whether the model had tools; a call that continues another one has that one's."""
    return _lineage(call).get("base") is not None or bool(own_tools(call))


def digests(call: CallRow) -> tuple[str, str]:
    """Digests of the call's instructions and of its tools: equal for equal ones."""
    lineage = _lineage(call)
    return str(lineage.get("system")), str(lineage.get("tools"))


def repeats(call: CallRow) -> str | None:
    """The call whose request this one sends again."""
    return _lineage(call).get("retry_of")


def _lineage(call: CallRow) -> Mapping[str, Any]:
    return call.conversation.get("lineage") or {}
