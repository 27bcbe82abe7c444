"""A session's turns, indexed by everything that a request can be recognised by."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from bridle.proxy.lineage.digests import Digester, digest_of, spoken_text
from bridle.proxy.lineage.turn import Sampled, Turn
from bridle.store.reading.summaries import SUMMARY_LENGTH, quotable
from bridle.store.records import RequestDigests

Key = TypeVar("Key")
Below = tuple[str, int] | None
"""A place in the tree: below one reply of a call, or at the root."""

_BEGINNINGS: Final = re.compile(r"(?<!\w)\w|[^\w\s]")
"""Where a quoted text may begin: at a word, or at any sign that is not part of one."""


class TurnIndex:
    """Turns by id (longest out of use first), by place, by reply and by question."""

    def __init__(self, *, unrelated: bool = False) -> None:
        """``unrelated``: the turns are of many sessions that know nothing of each other, so that
        two equal conversations are one run after another, not one that asked again."""
        self.unrelated = unrelated
        self.digester = Digester()
        self.turns: OrderedDict[str, Turn] = OrderedDict()
        self._children: dict[Below, dict[bytes, list[Turn]]] = {}
        self._replies: dict[bytes, list[Turn]] = {}
        self._questions: dict[tuple[object, ...], list[Turn]] = {}
        self._echoed: dict[str, int] = {}
        self._openings: dict[str, list[Turn]] = {}
        """By the first ``SUMMARY_LENGTH`` characters of what may be quoted of each reply."""
        self._depths: dict[tuple[bytes, str | None], list[int]] = {}
        """Of the turns with these instructions and agent: how many there are, and the depth of the
        deepest there has been."""

    def add(self, turn: Turn) -> None:
        """Adds a call that is over, or replaces what was known of it."""
        known = self.turns.get(turn.call_id)
        if known is not None:
            self.remove(known)
        below = _below(turn)
        siblings = self._children.setdefault(below, {})
        siblings.setdefault(_first(turn.seen.units), []).append(turn)
        for digest in _echoes(turn):
            self._replies.setdefault(digest, []).append(turn)
        for opening in _openings(turn):
            self._openings.setdefault(opening, []).append(turn)
        depths = self._depths.setdefault(_speaker(turn.seen), [0, 0])
        depths[:] = depths[0] + 1, max(depths[1], turn.seen.depth)
        self._questions.setdefault(question(below, turn.seen), []).append(turn)
        for used in _used(turn):
            self._echoed[used] = self._echoed.get(used, 0) + 1
            if used in self.turns:
                self.turns.move_to_end(used)
        self.turns[turn.call_id] = turn

    def remove(self, turn: Turn) -> None:
        del self.turns[turn.call_id]
        below = _below(turn)
        siblings = self._children[below]
        _discard(siblings, _first(turn.seen.units), turn)
        if not siblings:
            del self._children[below]
        for digest in _echoes(turn):
            _discard(self._replies, digest, turn)
        for opening in _openings(turn):
            _discard(self._openings, opening, turn)
        depths = self._depths[_speaker(turn.seen)]
        depths[0] -= 1
        if not depths[0]:
            del self._depths[_speaker(turn.seen)]
        _discard(self._questions, question(below, turn.seen), turn)
        for used in _used(turn):
            self._echoed[used] -= 1
            if not self._echoed[used]:
                del self._echoed[used]

    def leaves(self) -> list[Turn]:
        """Turns that no other turn builds on: lone calls first, then ends of longer lines; each
        longest out of use first."""
        bases = {turn.base.call_id for turn in self.turns.values() if turn.base is not None}
        ends = (turn for turn in self.turns.values() if turn.call_id not in bases)
        return sorted(ends, key=lambda turn: turn.base is not None)

    def children(self, below: Below, first: bytes) -> Sequence[Turn]:
        """Turns at a place whose first new step is ``first``, or that asked nothing new there."""
        siblings = self._children.get(below)
        if not siblings:
            return ()
        nothing_new = siblings.get(b"")
        found = siblings.get(first, ())
        return found if nothing_new is None else [*found, *nothing_new]

    def replied(self, digest: bytes) -> Sequence[Turn]:
        """Turns with a reply that says this, or that calls this beside a text; oldest first."""
        return self._replies.get(digest, ())

    def asked(self, below: Below, seen: RequestDigests) -> Sequence[Turn]:
        """Turns that asked exactly this at this place, oldest first."""
        return self._questions.get(question(below, seen), ())

    def deepest(self, seen: RequestDigests) -> int:
        """Steps of the longest request known under the instructions and agent of ``seen``."""
        return self._depths.get(_speaker(seen), (0, 0))[1]

    def opened_within(self, text: str) -> Iterator[Turn]:
        """Turns with a long reply that may stand in ``text``; costs what ``text`` is long, however
        many turns there are."""
        if self._openings:
            for match in _BEGINNINGS.finditer(text):
                at = match.start()
                yield from self._openings.get(text[at : at + SUMMARY_LENGTH], ())

    def echoed(self, turn: Turn) -> bool:
        """Whether a later call was built on this one's reply."""
        return turn.call_id in self._echoed

    def descends(self, turn: Turn, ancestor: Turn) -> bool:
        """Whether ``turn`` lies below ``ancestor``, by base or by parent, or is it."""
        at: Turn | None = turn
        while at is not None:
            if at.call_id == ancestor.call_id:
                return True
            at = at.base or self.turns.get(at.parent_call_id or "")
        return False


def question(below: Below, seen: RequestDigests) -> tuple[object, ...]:
    """Equal for requests that ask the same at the same place, sampling parameters aside."""
    return (below, seen.system, seen.tools, seen.ask, seen.units)


def echoes(reply: Sampled) -> set[bytes]:
    """Digests of a reply and of its tool calls alone: some harnesses drop the text beside them."""
    if not reply.message.tool_calls or not reply.message.content:
        return {reply.digest}
    return {reply.digest, digest_of(msgspec.structs.replace(reply.message, content=None))}


def _echoes(turn: Turn) -> set[bytes]:
    return set().union(*map(echoes, turn.choices))


def summaries(turn: Turn) -> list[str]:
    """What may be quoted of the turn's replies if they are summaries."""
    return [text for choice in turn.choices for text in quotable(spoken_text(choice.message))]


def _openings(turn: Turn) -> set[str]:
    return {text[:SUMMARY_LENGTH] for text in summaries(turn)}


def _speaker(seen: RequestDigests) -> tuple[bytes, str | None]:
    return (seen.system, seen.agent)


def _below(turn: Turn) -> Below:
    return (turn.base.call_id, turn.base_choice) if turn.base is not None else None


def _first(units: Sequence[bytes]) -> bytes:
    return units[0] if units else b""


def _used(turn: Turn) -> set[str]:
    """The calls whose replies this turn's request repeats."""
    used = set() if turn.parent_call_id is None else {turn.parent_call_id}
    if turn.base is not None:
        used.add(turn.base.call_id)
    return used


def _discard(lists: dict[Key, list[Turn]], key: Key, turn: Turn) -> None:
    remaining = lists[key]
    remaining.remove(turn)
    if not remaining:
        del lists[key]
