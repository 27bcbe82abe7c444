"""The parent of a request whose history was rewritten.

It is the call whose reply is echoed last, or the call that wrote the summary in the history's
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridle.proxy.session.digests import Unit, meaning_parts, spoken_text
from bridle.proxy.session.match import (
    WHOLE,
    Place,
    compare_step,
    names_own_calls,
    own_head,
    same_call,
)
from bridle.proxy.session.turn import Turn, TurnIndex, calls_alone, summaries
from bridle.proxy.wire.canonical import Message
from bridle.store.reading.summaries import SUMMARY_LENGTH
from bridle.store.records import RequestDigests


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A request whose history above its base is not the recorded one."""

    index: TurnIndex
    messages: Sequence[Message]
    units: Sequence[Unit]
    """The steps of the request."""
    seen: RequestDigests
    cut: Sequence[Place]
    """The places of replies that the request echoes only in part, after an unchanged history."""

    def echoed_last(self, base: Place | None) -> Place | None:
        """Return the place of the reply that is echoed last after the base.

        Its own history does not stand before it. Return ``None`` if there is none.
        """
        start = base.end if base is not None else 0
        for at in range(len(self.units) - 1, start - 1, -1):
            unit = self.units[at]
            if unit.message is None:
                continue
            found = (
                self._cut_here(at, base)
                or self._minted_here(unit, at)
                or self._worded_here(unit, at, base)
            )
            if found is not None:
                return found
        return None

    def summariser(self) -> Turn | None:
        """Return the call that summarised the history before this new conversation, or ``None``.

        Its reply, or the end of it inside a tag, stands whole in a user or system message, and the
        session knows a longer conversation with the same instructions.
        """
        if self.index.deepest(self.seen) <= self.seen.depth:
            return None
        found = {
            turn.call_id: turn
            for unit in self.units
            if unit.role in ("user", "system")
            for text in meaning_parts(self.messages[unit.start].content)
            if isinstance(text, str) and len(text) >= SUMMARY_LENGTH
            for turn in self.index.opened_within(text)
            if any(summary in text for summary in summaries(turn)) and not _contains(turn, unit)
        }
        if len(found) < 2:
            return next(iter(found.values()), None)
        return next(turn for turn in reversed(self.index.turns.values()) if turn.call_id in found)

    def _cut_here(self, at: int, base: Place | None) -> Place | None:
        above = base.turn if base is not None else None
        here = [place for place in reversed(self.cut) if place.end == at + 1]
        below = [place for place in here if same_call(place.turn.base, above)]
        own = (place for place in here if own_head(place.turn, self.seen))
        return next(iter(below or own), None)

    def _minted_here(self, unit: Unit, at: int) -> Place | None:
        turns = self.index.turns
        turn = next((turns[one] for one in reversed(unit.minted) if one in turns), None)
        if turn is None:
            return None
        same = [n for n in range(len(turn.choices)) if self._repeats(unit, turn, n)]
        choice = max(same, key=lambda n: names_own_calls(turn, n, unit), default=0)
        return Place(turn, choice, at + 1, WHOLE, True)

    def _worded_here(self, unit: Unit, at: int, base: Place | None) -> Place | None:
        """Return the place of a recorded reply that has the same words as this unit.

        Return ``None`` unless the words are evidence enough.
        """
        for turn in reversed(self.index.replied(unit.digest)):
            choice = next(
                n
                for n, reply in enumerate(turn.choices)
                if unit.digest == reply.digest or unit.digest == calls_alone(reply.message)
            )
            if base is not None:
                proven = self.index.descends(turn, base.turn)
            else:
                proven = _telling(turn.choices[choice].message) or self._follows(turn, at)
            if proven:
                return Place(turn, choice, at + 1, WHOLE, False)
        return None

    def _follows(self, turn: Turn, at: int) -> bool:
        """Whether the assistant's turn before unit ``at`` echoes the parent of ``turn``."""
        parent = self.index.turns.get(turn.parent_call_id or "")
        earlier = [unit for unit in self.units[:at] if unit.message is not None]
        if parent is None or not earlier:
            return False
        return any(self._repeats(earlier[-1], parent, n) for n in range(len(parent.choices)))

    def _repeats(self, unit: Unit, turn: Turn, choice: int) -> bool:
        """Whether the unit repeats the reply, or a part of it."""
        if turn.choices[choice].digest == unit.digest:
            return True
        return compare_step(turn, choice, unit, self.messages) is not None


def _contains(turn: Turn, unit: Unit) -> bool:
    """Return True if the call's own conversation has the step.

    The reply then repeats the step, for example a text that needed no correction, and the step does
    not quote the reply.
    """
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
