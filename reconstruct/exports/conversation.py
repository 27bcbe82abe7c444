"""Conversations put together again from what each call added to the one that it continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridle.errors import BridleError
from bridle.reconstruct.conversation import (
    Message,
    ReplyId,
    base,
    new_messages,
    replies,
    tools,
)
from bridle.store.reading.queries import CallRow


@dataclass(frozen=True, slots=True)
class Turn:
    """A message, and the call that sampled it (``None`` for what the harness sent)."""

    message: Message
    reply: ReplyId | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Everything up to and including one reply."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...]


class IncompleteConversation(BridleError, ValueError):
    """A call's messages were not recorded, or a call that it builds on is missing."""


class Conversations:
    """The conversations of one session."""

    def __init__(self, calls: Sequence[CallRow]) -> None:
        self._calls = {call.id: call for call in calls}

    def fold(self, last: ReplyId) -> Conversation:
        """The conversation that ends with this reply. Raises :class:`IncompleteConversation`."""
        pieces: list[list[Turn]] = []
        reply: ReplyId | None = last
        seen: set[str] = set()
        while reply is not None:
            call = self._calls.get(reply.call_id)
            asked = None if call is None else new_messages(call)
            if call is None or call.id in seen or asked is None or not replies(call):
                raise IncompleteConversation(f"the messages of call {reply.call_id} are not known")
            seen.add(call.id)
            given = [Turn(message) for message in asked]
            pieces.append([*given, Turn(replies(call)[reply.choice], reply)])
            reply = base(call)
        turns = tuple(turn for piece in reversed(pieces) for turn in piece)
        return Conversation(turns, tuple(tools(self._calls[last.call_id])))
