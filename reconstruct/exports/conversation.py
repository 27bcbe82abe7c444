"""Conversations put together again from what each call added to the one that it continues.

The proxy keeps with a call (``calls.conversation``) the chat messages that come after the base's
reply (``tail``), the tools where they differ from the base's (``tools``), and which call and choice
the base is (``lineage.base``, ``lineage.choice``; the parent call where lineage is silent). Without
a base the tail is the whole conversation. The reply itself is ``calls.message``; further choices
are in ``choices``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridle.errors import BridleError
from bridle.store.reading.queries import CallRow

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """Where an assistant message was sampled."""

    call_id: str
    choice: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A message, and the call that sampled it (``None`` for what the harness sent)."""

    message: Message
    reply: Reply | None = None


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

    def base(self, call: CallRow) -> Reply | None:
        """The reply that the call continues; a prompt holds what it continues itself."""
        if completes_prompt(call):
            return None
        lineage = call.conversation.get("lineage")
        if lineage is None:
            base, choice = call.parent_call_id, 0
        else:
            base, choice = lineage.get("base"), lineage.get("choice", 0)
        return None if base is None else Reply(base, choice)

    def fold(self, last: Reply) -> Conversation:
        """The conversation that ends with this reply. Raises :class:`IncompleteConversation`."""
        pieces: list[list[Turn]] = []
        tools: Sequence[Mapping[str, Any]] | None = None
        reply: Reply | None = last
        seen: set[str] = set()
        while reply is not None:
            call = self._calls.get(reply.call_id)
            if call is None or call.id in seen or "tail" not in call.conversation:
                raise IncompleteConversation(f"the messages of call {reply.call_id} are not known")
            seen.add(call.id)
            asked = [Turn(message) for message in call.conversation["tail"]]
            pieces.append([*asked, Turn(replies(call)[reply.choice], reply)])
            if tools is None:
                tools = call.conversation.get("tools")
            reply = self.base(call)
        turns = tuple(turn for piece in reversed(pieces) for turn in piece)
        return Conversation(turns, tuple(tools or ()))


def completes_prompt(call: CallRow) -> bool:
    """Whether the call was asked with a bare prompt, not with messages."""
    return call.dialect == "completions"


def replies(call: CallRow) -> list[Message]:
    """The chat messages of all choices. Raises :class:`IncompleteConversation` without any."""
    if not call.message:
        raise IncompleteConversation(f"call {call.id} has no reply")
    return [call.message, *call.conversation.get("choices", ())]
