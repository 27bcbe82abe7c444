"""The walk over a recorded conversation, from a reply back to the call that began it.

For each call, the store keeps the messages after the reply that it continues (its base). Without a
base, these messages are the whole conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from bridle.errors import BridleError
from bridle.store.call import CallRow
from bridle.store.records import Conversation, LineageState


class ReplyId(NamedTuple):
    """One sampled reply: a choice of a call."""

    call_id: str
    choice: int


class IncompleteConversation(BridleError, ValueError):
    """The messages of a call were not recorded, or a call that it continues is missing."""


def walk_back(
    last: ReplyId, call_of: Callable[[str], CallRow | None]
) -> Iterator[tuple[CallRow, Conversation, ReplyId]]:
    """Yield the calls of the conversation that ends with the reply ``last``, the latest first.

    Each call comes with the messages that its request brought and with its reply that the
    conversation has.

    Raise :class:`IncompleteConversation` at a call whose messages or reply are not known.
    """
    seen: set[str] = set()
    reply: ReplyId | None = last
    while reply is not None:
        call = call_of(reply.call_id)
        asked = None if call is None else call.conversation
        if call is None or asked is None or call.id in seen or reply.choice >= len(call.replies):
            raise IncompleteConversation(f"the messages of call {reply.call_id} are not known")
        seen.add(call.id)
        yield call, asked, reply
        reply = base(call)


def base(call: CallRow) -> ReplyId | None:
    """Return the reply that the call continues, if any.

    A bare prompt has none, because it repeats all of what it continues.
    """
    if completes_prompt(call):
        return None
    lineage = lineage_of(call)
    if lineage is None:
        return None if call.parent_call_id is None else ReplyId(call.parent_call_id, 0)
    if lineage.base_call_id is None:
        return None
    return ReplyId(lineage.base_call_id, lineage.base_choice)


def completes_prompt(call: CallRow) -> bool:
    """Return whether the call was asked with a bare prompt, not with messages."""
    asked = call.conversation
    return asked is not None and not asked.length and not asked.tail


def lineage_of(call: CallRow) -> LineageState | None:
    """Return what the proxy found about the call's place in its session, or ``None``."""
    return None if call.conversation is None else call.conversation.lineage
