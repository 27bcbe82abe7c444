"""The comparison of an echoed assistant turn with a recorded reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bridle.proxy.session.digests import (
    Unit,
    meaning_arguments,
    meaning_text,
    spoken_text,
    unfolded,
    value_digest,
)
from bridle.proxy.session.turn import Turn
from bridle.proxy.wire.canonical import Message, ToolCall
from bridle.proxy.wire.minting import MintedId, read
from bridle.store.records import RequestDigests

Part = Literal["whole", "prefix"]


@dataclass(frozen=True, slots=True)
class Match:
    """The part of a reply that was echoed, and the differences in its form."""

    part: Part
    differs: frozenset[str] = frozenset()
    """The names of the differences: any of ``reasoning`` (dropped), ``reasoning_edited``,
    ``arguments``, ``whitespace``, ``blocks``, ``ids``, ``folded``, ``order`` and ``text`` (text
    beside tool calls dropped)."""


WHOLE = Match("whole")


class Place(NamedTuple):
    """A recorded reply and the step of a request that echoes it."""

    turn: Turn
    choice: int
    end: int
    """Index of the unit after the echo."""
    match: Match
    minted: bool
    """True if the echo carries an id that this call minted."""


def compare_step(turn: Turn, choice: int, unit: Unit, messages: Sequence[Message]) -> Match | None:
    """Compare a step of a request with a reply of ``turn``, and name every difference in form.

    The request has these ``messages``. Return ``None`` if the step is another reply, or none.
    """
    if unit.message is None:
        return None
    return compare(turn.choices[choice].message, unit.message, messages[unit.start])


def own_head(turn: Turn, seen: RequestDigests) -> bool:
    """Return whether the call had the instructions and tools that have the digests ``seen``."""
    return (turn.seen.system, turn.seen.tools) == (seen.system, seen.tools)


def compare(reply: Message, echo: Message, raw_echo: Message | None = None) -> Match | None:
    """Compare ``echo`` with ``reply``. Return ``None`` if it is another reply.

    ``echo`` has its tool calls unfolded; ``raw_echo`` is the message as the harness wrote it.
    """
    reply = unfolded(reply)
    if reply.tool_calls and not echo.tool_calls and not echo.content:
        return None
    calls = _compare_calls(reply.tool_calls, echo.tool_calls)
    if calls is None:
        return None
    text = _compare_text(reply, echo)
    if text is None:
        return None
    whole = calls.part == "whole" and text.part == "whole"
    differs = calls.differs | text.differs | _reasoning(reply, echo)
    if raw_echo is not None and unfolded(raw_echo) is not raw_echo:
        differs |= {"folded"}
    return Match("whole" if whole else "prefix", differs)


def _compare_text(reply: Message, echo: Message) -> Match | None:
    said, echoed = spoken_text(reply), spoken_text(echo)
    if said == echoed:
        differs = set()
        if isinstance(echo.content, list):
            differs.add("blocks")
        elif (reply.content or "") != (echo.content or ""):
            differs.add("whitespace")
        return Match("whole", frozenset(differs))
    if not echoed:
        # Text beside tool calls is dropped by some clients; a lone text is not.
        return Match("whole", frozenset({"text"})) if echo.tool_calls else None
    if said.startswith(echoed):
        return Match("prefix")
    return None


def _compare_calls(reply: Sequence[ToolCall], echo: Sequence[ToolCall]) -> Match | None:
    differs = set()
    if len(echo) > len(reply):
        return None
    said = [(call.name, meaning_arguments(call.arguments)) for call in reply]
    echoed = [(call.name, meaning_arguments(call.arguments)) for call in echo]
    if len(echo) < len(reply):
        return Match("prefix") if _in_order(echoed, said) else None
    if said != echoed:
        if not _in_any_order(said, echoed):
            return None
        differs.add("order")
    elif any(one.arguments != other.arguments for one, other in zip(reply, echo, strict=True)):
        differs.add("arguments")
    if {call.id for call in reply} != {call.id for call in echo}:
        differs.add("ids")
    return Match("whole", frozenset(differs))


def _in_order(some: Sequence[object], of: Sequence[object]) -> bool:
    remaining = iter(of)
    return all(any(wanted == found for found in remaining) for wanted in some)


def _in_any_order(some: Sequence[object], others: Sequence[object]) -> bool:
    return sorted(map(value_digest, some)) == sorted(map(value_digest, others))


def _reasoning(reply: Message, echo: Message) -> frozenset[str]:
    said, echoed = reply.reasoning or "", echo.reasoning or ""
    if said == echoed:
        return frozenset()
    if meaning_text(said) == meaning_text(echoed):
        return frozenset({"whitespace"})
    return frozenset({"reasoning_edited" if echoed else "reasoning"})


def same_call(one: Turn | None, other: Turn | None) -> bool:
    """Return True if both are the same call.

    They may have been made from its record at different times.
    """
    if one is None or other is None:
        return one is other
    return one.call_id == other.call_id


def names_own_calls(turn: Turn, choice: int, unit: Unit) -> bool:
    """Return True if no tool call of the echo has the id of another sample's call.

    If samples differ only in their thoughts, the ids show which one the client continues.
    """
    if len(turn.choices) == 1 or unit.message is None:
        return True
    own = _minted_ids(turn.choices[choice].message)
    others = {minted for other in turn.choices for minted in _minted_ids(other.message)} - own
    return others.isdisjoint(_minted_ids(unit.message))


def _minted_ids(message: Message) -> set[MintedId]:
    return {minted for call in message.tool_calls if (minted := read(call.id)) is not None}
