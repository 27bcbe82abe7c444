"""Assistant messages with the fields that their upstream sent and their harness left out.

Most harnesses drop a reply's reasoning, and none of the dialects but chat has a place for a
provider's opaque fields. Some upstreams refuse the next request without them. The recorded reply
that a message echoes has both.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from bridle.proxy.session.turn import TurnIndex
from bridle.proxy.wire.canonical import Message
from bridle.proxy.wire.minting import call_ids


def with_upstream_fields(messages: Sequence[Message], turns: TurnIndex) -> tuple[Message, ...]:
    """Return ``messages`` with the reasoning and the opaque fields of the replies they echo."""
    return tuple([_restored(m, turns) if m.role == "assistant" else m for m in messages])


def _restored(message: Message, turns: TurnIndex) -> Message:
    reply = _echoed(message, turns)
    if reply is None:
        return message
    recorded = {call.id: call.extra for call in reply.tool_calls}
    calls = [structs.replace(call, extra=recorded.get(call.id)) for call in message.tool_calls]
    reasoning = message.reasoning or reply.reasoning
    return structs.replace(message, reasoning=reasoning, tool_calls=tuple(calls))


def _echoed(message: Message, turns: TurnIndex) -> Message | None:
    """Return the recorded reply that a message echoes.

    The reply is found by the ids that it was given, else by its meaning.
    """
    ids = {call.id for call in message.tool_calls}
    for call_id in call_ids([*ids, *message.anchors]):
        turn = turns.turns.get(call_id)
        for choice in () if turn is None else turn.choices:
            if not ids or ids & {call.id for call in choice.message.tool_calls}:
                return choice.message
    digest, _ = turns.digester.reply(message)
    for turn in reversed(turns.replied(digest)):
        return next(choice.message for choice in turn.choices if choice.digest == digest)
    return None
