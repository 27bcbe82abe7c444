"""The parent of a request whose history was rewritten: the call whose reply is echoed last, or the
call that wrote the summary in the history's place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridle.proxy.lineage.digests import Unit, meaning_parts, spoken_text
from bridle.proxy.lineage.match import WHOLE, Place, names_own_calls, same_call
from bridle.proxy.lineage.turn import Turn, calls_alone, summaries
from bridle.proxy.wire.canonical import Message
from bridle.store.reading.summaries import SUMMARY_LENGTH

if TYPE_CHECKING:
    from bridle.proxy.lineage.search import Search


def echoed_last(search: Search, base: Place | None) -> Place | None:
    """Return the place of the reply that is echoed last after the base without its own history
    before it, or ``None`` if there is none."""
    start = base.end if base is not None else 0
    for at in range(len(search.units) - 1, start - 1, -1):
        unit = search.units[at]
        if unit.message is None:
            continue
        found = (
            _cut_here(search, at, base)
            or _minted_here(search, unit, at)
            or _worded_here(search, unit, at, base)
        )
        if found is not None:
            return found
    return None


def summariser(search: Search) -> Turn | None:
    """Return the call that summarised the history before this new conversation, or ``None``. Its
    reply, or the end of it inside a tag, stands whole in a user or system message, and the session
    knows a longer conversation with the same instructions."""
    if search.index.deepest(search.seen) <= search.seen.depth:
        return None
    found = {
        turn.call_id: turn
        for unit in search.units
        if unit.role in ("user", "system")
        for text in meaning_parts(search.request.messages[unit.start].content)
        if isinstance(text, str) and len(text) >= SUMMARY_LENGTH
        for turn in search.index.opened_within(text)
        if any(summary in text for summary in summaries(turn)) and not _contains(turn, unit)
    }
    if len(found) < 2:
        return next(iter(found.values()), None)
    return next(turn for turn in reversed(search.index.turns.values()) if turn.call_id in found)


def _cut_here(search: Search, at: int, base: Place | None) -> Place | None:
    above = base.turn if base is not None else None
    here = [place for place in reversed(search.cut) if place.end == at + 1]
    below = [place for place in here if same_call(place.turn.base, above)]
    return next(iter(below or filter(search.own_head, here)), None)


def _minted_here(search: Search, unit: Unit, at: int) -> Place | None:
    for call_id in reversed(search.known_ids(unit)):
        turn = search.index.turns[call_id]
        choices = range(len(turn.choices))
        same = [n for n in choices if search.match(turn, n, unit) is not None]
        choice = max(same, key=lambda n: names_own_calls(turn, n, unit), default=0)
        return Place(turn, choice, at + 1, WHOLE, True)
    return None


def _worded_here(search: Search, unit: Unit, at: int, base: Place | None) -> Place | None:
    """Return the place of a recorded reply that has the same words as this unit, if that is
    evidence enough, else ``None``."""
    if unit.message is None:
        return None
    for turn in reversed(search.index.replied(unit.digest)):
        choice = next(
            n
            for n, reply in enumerate(turn.choices)
            if unit.digest == reply.digest or unit.digest == calls_alone(reply.message)
        )
        if base is not None:
            proven = search.index.descends(turn, base.turn)
        else:
            proven = _telling(turn.choices[choice].message) or _follows(search, turn, at)
        if proven:
            return Place(turn, choice, at + 1, WHOLE, False)
    return None


def _follows(search: Search, turn: Turn, at: int) -> bool:
    """Whether the assistant's turn before unit ``at`` echoes the parent of ``turn``."""
    parent = search.index.turns.get(turn.parent_call_id or "")
    earlier = [unit for unit in search.units[:at] if unit.message is not None]
    if parent is None or not earlier:
        return False
    choices = range(len(parent.choices))
    return any(search.match(parent, choice, earlier[-1]) is not None for choice in choices)


def _contains(turn: Turn, unit: Unit) -> bool:
    """Return True if the call's own conversation has the step. The reply then repeats the step, for
    example a text that needed no correction, and the step does not quote the reply."""
    at: Turn | None = turn
    while at is not None:
        if unit.digest in at.seen.units:
            return True
        at = at.base
    return False


def _telling(reply: Message) -> bool:
    """Return True if a reply is so long that two calls hardly give the same one."""
    arguments = sum(len(call.arguments) for call in reply.tool_calls)
    return len(spoken_text(reply)) + arguments >= SUMMARY_LENGTH
