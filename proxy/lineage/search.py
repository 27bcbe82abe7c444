"""One request against one session's turns: see ``proxy/lineage/lineage.py`` for the idea."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain, groupby
from typing import NamedTuple

from msgspec import structs

from bridle.proxy.lineage.digests import (
    Digester,
    Unit,
    meaning_parts,
    spoken_text,
    value_digest,
)
from bridle.proxy.lineage.index import Below, TurnIndex, echoes, summaries
from bridle.proxy.lineage.match import Match, compare
from bridle.proxy.lineage.turn import Link, Seen, Turn
from bridle.proxy.wire.canonical import Message, Request
from bridle.proxy.wire.minting import MintedId, call_id_of, read
from bridle.store.reading.summaries import SUMMARY_LENGTH
from bridle.store.records import BreakReason, CallStatus

COMPACTED_BELOW = 2 / 3
"""A rewritten history with fewer steps than this share of what it was is a compaction."""


_WHOLE = Match("whole")

_NO_TOOLS = value_digest(())
_PLAIN_ASK = value_digest([None, None])


class _Place(NamedTuple):
    """A recorded reply and the step of the request that echoes it."""

    turn: Turn
    choice: int
    end: int
    """Index of the unit after the echo."""
    match: Match
    minted: bool
    """Whether the echo carries an id that this call minted."""


class Search:
    """Finds the base (history unchanged), then the parent (whose reply is echoed last)."""

    def __init__(
        self,
        index: TurnIndex,
        digester: Digester,
        request: Request,
        agent: str | None,
        *,
        unrelated: bool = False,
    ) -> None:
        self.index = index
        self.unrelated = unrelated
        self.request = request
        named = request.previous_response_id
        self.previous = None if named is None else call_id_of(named)
        system, system_form, self.leading = digester.system(request.messages)
        self.units = digester.units(request.messages, self.leading)
        self.digests = tuple([unit.digest for unit in self.units])
        self.seen = Seen(
            system=system,
            system_form=system_form,
            tools=value_digest(request.tools) if request.tools else _NO_TOOLS,
            ask=_ask_digest(request),
            units=self.digests,
            forms=tuple([unit.form for unit in self.units]),
            depth=len(self.units),
            agent=agent,
            arguments=_arguments(request),
        )
        self.cut: list[_Place] = []
        """Replies of which the request echoes only a part, their history standing unchanged."""
        self.passed_over: list[tuple[Below, Turn]] = []
        """Calls after whose question, unchanged, something else than a reply stands."""

    def link(self) -> Link:
        """The verdict."""
        base = self._deepest()
        link = self._unbroken(base)
        if base is not None:
            link = self._same_head(link, base)
        named = self._named(base)
        if named is not None:
            link = self._broken(link, named)
        elif base is None:
            link = self._compacted(link)
        if link.parent is not None and not link.parent.choices:
            link = structs.replace(link, break_reason=BreakReason.PARENT_WITHOUT_IDS)
        earlier, dropped, unknown = self._retry(link), self._dropped(link), self._unknown()
        if earlier is None and dropped is None and not unknown:
            return link
        return structs.replace(
            link,
            retry_of=earlier.call_id if earlier is not None else None,
            retry_after=earlier.status if earlier is not None else None,
            dropped=dropped.call_id if dropped is not None else None,
            unknown=unknown,
        )

    # — the base: following the request down from the roots —

    def _deepest(self) -> _Place | None:
        places = sorted(self._places(), key=lambda place: -place.end)
        for _, equals in groupby(places, key=lambda place: place.end):
            own = [place for place in equals if not self._foreign(place)]
            if own:
                if len(own) == 1:
                    return own[0]
                if self.unrelated:
                    own = self._latest_first(own)
                return max(own, key=self._rank)
        return None

    def _latest_first(self, places: list[_Place]) -> list[_Place]:
        """The places as their conversations went on, the latest first."""
        ids = {place.turn.call_id for place in places}
        order: dict[str, int] = {}
        for call_id in reversed(self.index.turns):
            if call_id in ids:
                order[call_id] = len(order)
                if len(order) == len(ids):
                    break
        return sorted(places, key=lambda place: order[place.turn.call_id])

    def _places(self) -> list[_Place]:
        """Every reply that the request repeats whole, with its whole history."""
        found: list[_Place] = []
        open_: list[tuple[Below, int]] = [(None, 0)]
        digests = self.digests
        while open_:
            below, start = open_.pop()
            if start >= len(digests):
                continue
            for turn in self.index.children(below, digests[start]):
                end = start + len(turn.seen.units)
                if digests[start:end] != turn.seen.units:
                    continue
                if end < len(digests) and self.units[end].message is None:
                    self.passed_over.append((below, turn))
                for place in self._replies_at(turn, end):
                    if place.match.part == "prefix":
                        self.cut.append(place)
                        continue
                    found.append(place)
                    open_.append(((turn.call_id, place.choice), place.end))
        return found

    def _replies_at(self, turn: Turn, index: int) -> list[_Place]:
        """The replies of ``turn`` that unit ``index`` echoes."""
        if index >= len(self.units) or self.units[index].message is None:
            return []
        unit = self.units[index]
        minted = self._known_ids(unit)
        if minted and turn.call_id not in minted:
            return []
        places = []
        for choice in range(len(turn.choices)):
            match = self._match(turn, choice, unit)
            if match is not None:
                places.append(_Place(turn, choice, index + 1, match, bool(minted)))
        return places

    def _match(self, turn: Turn, choice: int, unit: Unit) -> Match | None:
        if turn.choices[choice].digest == unit.digest:
            return _WHOLE
        return self._compared(turn, choice, unit)

    def _compared(self, turn: Turn, choice: int, unit: Unit) -> Match | None:
        if unit.message is None:
            return None
        raw = self.request.messages[unit.start]
        return compare(turn.choices[choice].message, unit.message, raw)

    def _rank(self, place: _Place) -> tuple[object, ...]:
        """Greater is better; among equals the first found stays."""
        turn, seen = place.turn, self.seen
        return (
            turn.call_id == self.previous,
            turn.seen.system == seen.system,
            turn.seen.tools == seen.tools,
            turn.seen.agent == seen.agent,
            self._names(place.turn, place.choice, self.units[place.end - 1]),
            not self._answered_below(place) if self.unrelated else self._asked_below(place),
            self._leads_on(place),
            self.unrelated or not self.index.echoed(turn),
            turn.status is CallStatus.COMPLETE,
        )

    def _asked_below(self, place: _Place) -> bool:
        """Whether this very question went on from there before; under other instructions or tools
        than the place's own it was recorded from the start."""
        turn = place.turn
        rest = structs.replace(self.seen, units=self.digests[place.end :])
        return bool(self.index.asked((turn.call_id, place.choice), rest)) or any(
            asked.parent_call_id == turn.call_id for asked in self.index.asked(None, self.seen)
        )

    def _answered_below(self, place: _Place) -> bool:
        """Whether this very question has been answered there: to an equal conversation's run."""
        rest = structs.replace(self.seen, units=self.digests[place.end :])
        asked = self.index.asked((place.turn.call_id, place.choice), rest)
        return any(turn.status is CallStatus.COMPLETE for turn in asked)

    def _own_head(self, place: _Place) -> bool:
        """Whether the call had the instructions and tools that this request has."""
        seen = place.turn.seen
        return (seen.system, seen.tools) == (self.seen.system, self.seen.tools)

    def _names(self, turn: Turn, choice: int, unit: Unit) -> bool:
        """Whether no tool call of the echo has the id of another sample's: of samples that show the
        same and thought differently, the client says which one it goes on from."""
        if len(turn.choices) == 1 or unit.message is None:
            return True
        own = _call_marks(turn.choices[choice].message)
        of_others = {
            minted for other in turn.choices for minted in _call_marks(other.message)
        } - own
        return of_others.isdisjoint(_call_marks(unit.message))

    def _leads_on(self, place: _Place) -> bool:
        """Whether a reply that is echoed later was given below this one: then, of samples that say
        the same, this one was used."""
        return any(
            self.index.descends(turn, place.turn)
            for unit in self.units[place.end :]
            if unit.message is not None
            for turn in self.index.replied(unit.digest)
        )

    def _foreign(self, place: _Place) -> bool:
        """Another agent's call: other instructions, other tools, and no echoed id to vouch."""
        seen = place.turn.seen
        if seen.system == self.seen.system or seen.tools == self.seen.tools:
            return False
        echoed = {call_id for unit in self.units[: place.end] for call_id in unit.minted}
        turn: Turn | None = place.turn
        while turn is not None:
            if turn.call_id in echoed or turn.call_id == self.previous:
                return False
            turn = turn.base
        return True

    # — the parent: the last echo, wherever its history went —

    def _named(self, base: _Place | None) -> _Place | None:
        """The call whose reply is echoed last after the base, its history not standing there."""
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

    def _cut_here(self, at: int, base: _Place | None) -> _Place | None:
        above = base.turn if base is not None else None
        here = [place for place in reversed(self.cut) if place.end == at + 1]
        below = [place for place in here if same_call(place.turn.base, above)]
        return next(iter(below or filter(self._own_head, here)), None)

    def _minted_here(self, unit: Unit, at: int) -> _Place | None:
        for call_id in reversed(self._known_ids(unit)):
            turn = self.index.turns[call_id]
            choices = range(len(turn.choices))
            same = [n for n in choices if self._match(turn, n, unit) is not None]
            choice = max(same, key=lambda n: self._names(turn, n, unit), default=0)
            return _Place(turn, choice, at + 1, _WHOLE, True)
        return None

    def _worded_here(self, unit: Unit, at: int, base: _Place | None) -> _Place | None:
        """A recorded reply in this unit's very words, where that is evidence enough."""
        if unit.message is None:
            return None
        for turn in reversed(self.index.replied(unit.digest)):
            choice = next(n for n, reply in enumerate(turn.choices) if unit.digest in echoes(reply))
            if base is not None:
                proven = self.index.descends(turn, base.turn)
            else:
                proven = _telling(turn.choices[choice].message) or self._follows(turn, at)
            if proven:
                return _Place(turn, choice, at + 1, _WHOLE, False)
        return None

    def _follows(self, turn: Turn, at: int) -> bool:
        """Whether the assistant's turn before unit ``at`` echoes the parent of ``turn``."""
        parent = self.index.turns.get(turn.parent_call_id or "")
        earlier = [unit for unit in self.units[:at] if unit.message is not None]
        if parent is None or not earlier:
            return False
        choices = range(len(parent.choices))
        return any(self._match(parent, choice, earlier[-1]) is not None for choice in choices)

    def _summariser(self) -> Turn | None:
        """The call whose reply, or the end of it inside a tag, stands whole in this new
        conversation's first messages, when the session knows a longer one with the same
        instructions."""
        if self.index.deepest(self.seen) <= self.seen.depth:
            return None
        found = {
            turn.call_id: turn
            for unit in self.units
            if unit.role in ("user", "system")
            for text in meaning_parts(self.request.messages[unit.start].content)
            if isinstance(text, str) and len(text) >= SUMMARY_LENGTH
            for turn in self.index.opened_within(text)
            if any(told in text for told in summaries(turn)) and not _was_told(turn, unit)
        }
        if len(found) < 2:
            return next(iter(found.values()), None)
        return next(turn for turn in reversed(self.index.turns.values()) if turn.call_id in found)

    # — the verdict —

    def _unbroken(self, base: _Place | None) -> Link:
        """The link of a request that continues ``base``, or starts a conversation."""
        if base is None:
            return Link(seen=self.seen, tail=self.request.messages)
        end = base.end
        return Link(
            seen=structs.replace(self.seen, units=self.digests[end:], forms=self.seen.forms[end:]),
            parent=base.turn,
            base=base.turn,
            choice=base.choice,
            rule="minted_id" if base.minted else "content",
            differs=_merged(base.turn.differs, self._differs(base)),
            confidence=self._confidence(base),
            tail=self.request.messages[self.units[end - 1].end :],
        )

    def _same_head(self, link: Link, base: _Place) -> Link:
        """A changed system prompt or tool set stands before everything else in the prompt: then
        nothing of the base's tokens can be kept."""
        seen = base.turn.seen
        system, tools = seen.system != self.seen.system, seen.tools != self.seen.tools
        if not system and not tools:
            return link
        reason = BreakReason.SYSTEM_CHANGED if system else BreakReason.TOOLS_CHANGED
        changed = ["system"] * system + ["tools"] * tools
        return structs.replace(
            link,
            seen=self.seen,
            base=None,
            choice=0,
            tail=self.request.messages,
            differs=_merged(link.differs, changed),
            break_reason=reason,
        )

    def _broken(self, link: Link, named: _Place) -> Link:
        """The request goes on from ``named``, but what stood before it was rewritten."""
        seen = named.turn.seen
        if link.break_reason is not None and not self._own_head(named):
            reason = link.break_reason
        elif named.match.part == "prefix":
            reason = BreakReason.TRUNCATED
        elif named.end - 1 < COMPACTED_BELOW * seen.depth:
            reason = BreakReason.COMPACTED
        else:
            reason = BreakReason.EDITED
        return structs.replace(
            link,
            parent=named.turn,
            rule="minted_id" if named.minted else "content",
            confidence=0.95 if named.minted else 0.7,
            differs=_merged(named.turn.differs, link.differs, {"history"}, named.match.differs),
            break_reason=reason,
        )

    def _compacted(self, link: Link) -> Link:
        summariser = self._summariser()
        if summariser is None:
            return link
        return structs.replace(
            link,
            parent=summariser,
            rule="content",
            confidence=0.6,
            differs=("history",),
            break_reason=BreakReason.COMPACTED,
        )

    def _differs(self, place: _Place) -> set[str]:
        """What this request writes differently than the base's request and reply did."""
        seen, found = place.turn.seen, set(place.match.differs)
        compared = self._compared(place.turn, place.choice, self.units[place.end - 1])
        if compared is not None:
            found |= compared.differs
        first = place.end - 1 - len(seen.units)
        for form, unit in zip(seen.forms, self.units[first:], strict=False):
            if form != unit.form:
                found.add(f"{unit.role}_form")
        if seen.system_form != self.seen.system_form:
            found.add("system_form")
        return found

    def _confidence(self, place: _Place) -> float:
        if place.minted or place.turn.call_id == self.previous:
            return 1.0
        turn = place.turn
        twins = any(
            other is not turn
            and same_call(other.base, turn.base)
            and other.seen.units == turn.seen.units
            for other in self.index.replied(turn.choices[place.choice].digest)
        )
        return 0.5 if twins else 0.95

    def _retry(self, link: Link) -> Turn | None:
        below = (link.base.call_id, link.choice) if link.base is not None else None
        for turn in reversed(self.index.asked(below, link.seen)):
            if turn.seen.agent == self.seen.agent:
                return None if self.index.echoed(turn) else turn
        return None

    def _dropped(self, link: Link) -> Turn | None:
        """The call whose whole question stands in the request, and whose reply does not: what came
        next stands in its place."""
        if not self.passed_over:
            return None
        below = (link.base.call_id, link.choice) if link.base is not None else None
        asked = [
            turn
            for above, turn in self.passed_over
            if above == below
            and turn.choices
            and (turn.seen.system, turn.seen.tools) == (self.seen.system, self.seen.tools)
            and turn.seen.agent == self.seen.agent
            and not self.index.echoed(turn)
        ]
        # Each call tells of the reply before it: earlier ones were told of by then.
        return max(asked, key=lambda turn: len(turn.seen.units), default=None)

    def _known_ids(self, unit: Unit) -> tuple[str, ...]:
        turns = self.index.turns
        return tuple([call_id for call_id in unit.minted if call_id in turns])

    def _unknown(self) -> tuple[str, ...]:
        turns = self.index.turns
        ids = [one for unit in self.units for one in unit.minted if one not in turns]
        if self.previous is not None and self.previous not in turns:
            ids.append(self.previous)
        return tuple(dict.fromkeys(ids))


def _call_marks(message: Message) -> set[MintedId]:
    return {minted for call in message.tool_calls if (minted := read(call.id)) is not None}


def _ask_digest(request: Request) -> bytes:
    if request.tool_choice is None and request.response_format is None:
        return _PLAIN_ASK
    return value_digest([request.tool_choice, request.response_format])


def _arguments(request: Request) -> str | None:
    arguments = request.template_arguments
    return json.dumps(arguments, sort_keys=True) if arguments else None


def _was_told(turn: Turn, unit: Unit) -> bool:
    """Whether the call's own conversation has the step: then its reply repeats that, as a text that
    needed no correction, and not the other way round."""
    at: Turn | None = turn
    while at is not None:
        if unit.digest in at.seen.units:
            return True
        at = at.base
    return False


def _telling(reply: Message) -> bool:
    """Whether a reply is so long that two calls hardly give the same."""
    arguments = sum(len(call.arguments) for call in reply.tool_calls)
    return len(spoken_text(reply)) + arguments >= SUMMARY_LENGTH


def same_call(one: Turn | None, other: Turn | None) -> bool:
    """Whether both are the same call, whenever they were made from its record."""
    if one is None or other is None:
        return one is other
    return one.call_id == other.call_id


def _merged(*names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(chain.from_iterable(names))))
