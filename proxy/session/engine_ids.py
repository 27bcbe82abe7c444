"""Messages as the engine knows them: with its own tool-call ids in place of the minted ones.

Clients are sent ids that name the recorded call. A template may demand another form (nine
characters for one), or write the id that the policy sampled; a minted id would then refer to
nothing. The record keeps the ids that the client sent; only the engine and rendered tails get the
engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from bridle.proxy.wire.canonical import Message
from bridle.proxy.wire.written import Written


def with_engine_ids(
    messages: Sequence[Message], engine_ids: Mapping[str, str]
) -> tuple[Message, ...]:
    """Return ``messages`` with every minted id that ``engine_ids`` knows replaced."""
    return tuple(
        [_translated(m, engine_ids) if m.tool_calls or m.tool_call_id else m for m in messages]
    )


def written_messages(
    messages: Sequence[Message], engine_ids: Mapping[str, str], written: Written
) -> tuple[bytes, ...]:
    """Return the pieces of a JSON array of the messages, with the engine's own tool-call ids.

    ``written`` are the first of them; those that are missing there are added.
    """
    written.add([_chat(message, engine_ids) for message in messages[written.count :]])
    return written.pieces()


def _chat(message: Message, engine_ids: Mapping[str, str]) -> dict[str, Any]:
    """Return a message in chat shape, of which no translated copy is made: there may be many."""
    chat = message.to_chat()
    for call in chat.get("tool_calls", ()):
        call["id"] = engine_ids.get(call["id"], call["id"])
    if message.tool_call_id is not None:
        chat["tool_call_id"] = engine_ids.get(message.tool_call_id, message.tool_call_id)
    return chat


def _translated(message: Message, engine_ids: Mapping[str, str]) -> Message:
    calls = tuple(
        [
            structs.replace(call, id=engine_ids.get(call.id, call.id), engine_id=None)
            for call in message.tool_calls
        ]
    )
    answered = message.tool_call_id
    if answered is not None:
        answered = engine_ids.get(answered, answered)
    return structs.replace(message, tool_calls=calls, tool_call_id=answered)
