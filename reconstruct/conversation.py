"""What a recorded call was asked, and what it continues.

The store keeps with a call the messages that come after the reply that it continues (its own
messages), its tools, digests of its instructions and tools, and which reply it continues: its
base, or its parent call's reply where lineage recorded nothing. Without a base its own messages are
the whole conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bridle.store.reading.queries import CallRow
from bridle.store.records import LineageState

Message = Mapping[str, Any]


class ReplyId(NamedTuple):
    """One sampled reply: a choice of a call."""

    call_id: str
    choice: int


def new_messages(call: CallRow) -> Sequence[Message] | None:
    """The messages after the base's reply; ``None`` when they were not recorded."""
    said = call.conversation
    return None if said is None else [message.to_chat() for message in said.tail]


def tools(call: CallRow) -> Sequence[Mapping[str, Any]]:
    """The definitions of the call's tools."""
    return () if call.conversation is None else call.conversation.tools


def replies(call: CallRow) -> list[Message]:
    """The chat messages of all choices; empty when the call has no reply."""
    return [message.to_chat() for message in call.replies]


def base(call: CallRow) -> ReplyId | None:
    """The reply that the call continues; a bare prompt repeats all of what it continues."""
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
    return call.dialect == "completions"


def digests(call: CallRow) -> tuple[bytes, bytes]:
    """Digests of the call's instructions and of its tools: equal for equal ones."""
    lineage = _lineage(call)
    if lineage is None:
        return b"", b""
    return lineage.digests.system, lineage.digests.tools


def repeats(call: CallRow) -> str | None:
    """The call whose request this one sends again."""
    lineage = _lineage(call)
    return None if lineage is None else lineage.retry_of


def _lineage(call: CallRow) -> LineageState | None:
    return None if call.conversation is None else call.conversation.lineage
