"""Turns that a client folded into the assistant message before them, and their unfolding.

Some clients append the tool calls of a turn without text to the last assistant message that they
have, or put a run of such turns before the results of all of them. Each call's id names the reply
that it came with, so the turns are put back into the order in which they were sampled. That is done
only if each of these replies was given below the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from msgspec import structs

from bridle.proxy.session.turn import TurnIndex
from bridle.proxy.wire.canonical import Message
from bridle.proxy.wire.minting import call_id_of


def has_folded(messages: Sequence[Message]) -> bool:
    """Return whether tool calls of several replies stand together, without results between them."""
    before: Message | None = None
    for message in messages:
        beside = before.tool_calls if before is not None else ()
        calls = (*beside[:1], *message.tool_calls) if message.tool_calls else ()
        if len(calls) > 1 and len({call_id_of(call.id) for call in calls}) > 1:
            return True
        before = message
    return False


def without_folds(messages: Sequence[Message], index: TurnIndex) -> tuple[Message, ...]:
    """Return the messages with each folded turn in a message of its own, before its results.

    Messages stay as they are if the recorded calls do not show that they were folded.
    """
    found: list[Message] = []
    at = 0
    while at < len(messages):
        middle = at
        while middle < len(messages) and messages[middle].role == "assistant":
            middle += 1
        end = middle
        while middle > at and end < len(messages) and messages[end].role == "tool":
            end += 1
        end = max(end, at + 1)
        turns = [turn for message in messages[at:middle] for turn in _turns(message)]
        if _is_folded(turns, index):
            found += _in_order(turns, messages[middle:end])
        else:
            found += messages[at:end]
        at = end
    return tuple(found)


def _reply_of(message: Message) -> str | None:
    """Return the id of the call that minted the id of the message's first tool call."""
    return call_id_of(message.tool_calls[0].id) if message.tool_calls else None


def _turns(message: Message) -> Iterator[Message]:
    """Yield the message in parts, each with the tool calls of one reply."""
    parts = groupby(message.tool_calls, key=lambda call: call_id_of(call.id))
    calls_of = [(reply, tuple(calls)) for reply, calls in parts]
    if len(calls_of) < 2:
        yield message
        return
    for at, (reply, calls) in enumerate(calls_of):
        anchors = tuple([one for one in message.anchors if call_id_of(one) == reply])
        turn = structs.replace(message, tool_calls=calls, anchors=anchors)
        yield structs.replace(turn, content=None, reasoning=None) if at else turn


def _is_folded(turns: Sequence[Message], index: TurnIndex) -> bool:
    """Return whether these are several turns, each given below the one before it."""
    replies = list(dict.fromkeys([_reply_of(turn) for turn in turns if turn.tool_calls]))
    if len(replies) < 2:
        return False
    known = [index.turns.get(reply or "") for reply in replies]
    return all(
        turn is not None and above is not None and index.descends(turn, above)
        for above, turn in pairwise(known)
    )


def _in_order(turns: Sequence[Message], results: Sequence[Message]) -> list[Message]:
    """Return the turns, and after the last part of each reply the results of its calls.

    Results of no known call come last.
    """
    last = {_reply_of(turn): at for at, turn in enumerate(turns) if turn.tool_calls}
    place = {call.id: last[_reply_of(turn)] for turn in turns for call in turn.tool_calls}
    found: list[Message] = []
    for at, turn in enumerate(turns):
        found.append(turn)
        found += [one for one in results if place.get(one.tool_call_id or "", len(turns) - 1) == at]
    return found
