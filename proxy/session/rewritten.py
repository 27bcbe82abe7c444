"""The parent of a request whose history was rewritten.

It is the call whose reply is echoed last, the call that wrote the summary in the history's place,
or the call that was asked the last steps before a reply in words of the harness's own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bridle.proxy.session.digests import Unit, meaning_parts, spoken_text
from bridle.proxy.session.match import (
    WHOLE,
    Place,
    compare_step,
    names_own_calls,
    own_head,
    same_call,
)
from bridle.proxy.session.turn import (
    Below,
    Link,
    Turn,
    TurnIndex,
    calls_alone,
    chained,
    ending_text,
    summaries,
)
from bridle.proxy.wire.canonical import Message
from bridle.store.reading.summaries import SUMMARY_LENGTH
from bridle.store.records import CallStatus, RequestDigests

_MOST_ASKED: Final = 16
"""Maximum number of calls that were asked the same, the latest, whose replies are compared."""
_MOST_BEGUN: Final = 32
"""Maximum number of calls, the latest, whose text may be the beginning of a longer one."""
_MOST_ALIKE: Final = 64
"""Maximum number of calls with the same reply, the latest, among which the one is sought that a
request without ids goes on from."""
_MOST_WORDS: Final = 0.5
"""The share of a reply's words from which on a message is taken to be the reply in other words."""
_QUOTED: Final = 2
"""Number of replies that a transcript of a conversation quotes."""
_READ: Final = 1 << 17
"""Characters of the user's messages in which quotations are looked for: 130,000 take 30 ms."""
_NOT_ENDED: Final = frozenset({CallStatus.FAILED, CallStatus.PARTIAL, CallStatus.INTERRUPTED})
_WORD: Final = re.compile(r"\w+")
_ESCAPED: Final = re.compile(r"\\[bfnrt]")


class Reworded(NamedTuple):
    """A call whose reply a request has in words of the harness's own."""

    turn: Turn
    at: int
    """Index of the step that has the reply's place."""
    share: float
    """The share of the reply's words that the step has."""


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
    chain: Sequence[int]
    """The hashes of the first steps, as of :func:`bridle.proxy.session.turn.chained`."""

    def echoed_last(self, base: Place | None, start: int) -> Place | None:
        """Return the place of the reply that is echoed last, in step ``start`` or after it.

        Its own history does not stand before it. Return ``None`` if there is none.
        """
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

    def asked_before(self, base: Place | None, link: Link) -> Reworded | None:
        """Return the latest call whose reply the harness put into words of its own.

        The call was asked the very steps that stand before these words. Of several such calls, the
        one whose reply shares most words with them is returned, and of equal ones the latest that
        no call goes on from. A call with other instructions or with other tools must share half of
        its words, and so must a reply that is written as another role's message, and every call in
        an index of unrelated sessions. A call with both is another agent's.

        ``link`` is the request's link to ``base``, which is not its base if other instructions or
        tools stand before it.
        """
        units, below, start, least = self.units, None, 0, 0
        if base is not None:
            least = base.end
            if link.base is not None:
                below, start = (link.base.call_id, link.choice), base.end
        found = self._longer_text(below, start)
        if found is not None or len(units) - start < 2:
            return found
        if not self.index.next_after(below, units[start].digest):
            return None
        digests, chain = self.seen.units, self._chain_from(start)
        for at in range(len(units) - 1, max(start, least - 1), -1):
            turns = self.index.requested(below, chain[at - start], digests, start, at)
            if turns and (found := self._worded_from(turns, at)) is not None:
                return found
        return None

    def _chain_from(self, start: int) -> Sequence[int]:
        return self.chain if start == 0 else chained(self.seen.units[start:])

    def _longer_text(self, below: Below, start: int) -> Reworded | None:
        """Return the latest call whose last text begins the request's, with its reply after it.

        Agents with a scratchpad write it all into one message of the user.
        """
        text = ending_text(self.messages)
        if text is None or start >= len(self.units):
            return None
        chain = self._chain_from(start)[len(self.units) - 1 - start]
        for turn in reversed(self.index.begun(below, chain, self.seen)[-_MOST_BEGUN:]):
            ending = turn.ending
            if ending is None or turn.seen.agent != self.seen.agent or not ending.begins(text):
                continue
            written = _words(Message("user", text[ending.length :]))
            share = max((_share(reply.message, written) for reply in turn.choices), default=0.0)
            if share >= _MOST_WORDS:
                return Reworded(turn, len(self.units) - 1, share)
        return None

    def _worded_from(self, turns: Sequence[Turn], at: int) -> Reworded | None:
        """Return the turn of which step ``at`` most likely words the reply, if there is one."""
        index, seen = self.index, self.seen
        needed = index.unrelated or self.units[at].message is None
        written = _words_of(self.messages, self._turn_at(at))
        best: tuple[tuple[bool, float, bool], Turn] | None = None
        for turn in turns[-_MOST_ASKED:]:
            share = max((_share(reply.message, written) for reply in turn.choices), default=-1.0)
            system, tools = (turn.seen.system == seen.system, turn.seen.tools == seen.tools)
            own = system and tools and turn.seen.agent == seen.agent
            if share < 0 or not (system or tools):
                continue
            if share < _MOST_WORDS and (needed or not own):
                continue
            rank = own, share, not index.echoed(turn)
            if best is None or rank >= best[0]:
                best = rank, turn
        return None if best is None else Reworded(best[1], at, best[0][1])

    def _turn_at(self, at: int) -> Sequence[Unit]:
        """Return step ``at`` and those after it that have its role."""
        end = at
        while end < len(self.units) and self.units[end].role == self.units[at].role:
            end += 1
        return self.units[at:end]

    def failed(self) -> tuple[Turn, ...]:
        """Return the calls that were asked the same, and of which none of a session has ended well.

        Each is the last one of its session, and the latest comes first.
        """
        last = {turn.session_id: turn for turn in self.index.asked(None, self.seen)}
        return tuple([turn for turn in reversed(last.values()) if turn.status in _NOT_ENDED])

    def quoted(self) -> Turn | None:
        """Return a call of the session of which the user's messages quote several replies.

        They are the transcript of a conversation, such as a summariser gets. A single reply may
        have been pasted by a person.
        """
        found: dict[str, dict[str, Turn]] = {}
        for text in self._user_texts():
            if len(text) >= 2 * SUMMARY_LENGTH:
                for turn in self.index.opened_within(text):
                    if any(summary in text for summary in summaries(turn)):
                        found.setdefault(turn.session_id, {})[turn.call_id] = turn
        most = max(found.values(), key=len, default={})
        return next(reversed(most.values())) if len(most) >= _QUOTED else None

    def _user_texts(self) -> Iterator[str]:
        """Yield the texts of the user's messages, up to ``_READ`` characters in all."""
        left = _READ
        for unit in self.units:
            if unit.role == "user":
                for text in meaning_parts(self.messages[unit.start].content):
                    if isinstance(text, str) and left > 0:
                        yield text[:left]
                        left -= len(text)

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
        before = self._reply_before(at)
        for turn in reversed(self.index.replied(unit.digest)[-_MOST_ALIKE:]):
            choice = next(
                n
                for n, reply in enumerate(turn.choices)
                if unit.digest == reply.digest or unit.digest == calls_alone(reply.message)
            )
            if base is not None:
                proven = self.index.descends(turn, base.turn)
            else:
                proven = _telling(turn.choices[choice].message) or self._follows(turn, before)
            if proven:
                return Place(turn, choice, at + 1, WHOLE, False)
        return None

    def _reply_before(self, at: int) -> Unit | None:
        """Return the last assistant's turn before unit ``at``."""
        for position in range(at - 1, -1, -1):
            if self.units[position].message is not None:
                return self.units[position]
        return None

    def _follows(self, turn: Turn, before: Unit | None) -> bool:
        """Return whether the assistant's turn ``before`` echoes the parent of ``turn``."""
        parent = self.index.turns.get(turn.parent_call_id or "")
        if parent is None or before is None:
            return False
        return any(self._repeats(before, parent, n) for n in range(len(parent.choices)))

    def _repeats(self, unit: Unit, turn: Turn, choice: int) -> bool:
        """Return whether the unit repeats the reply, or a part of it."""
        if turn.choices[choice].digest == unit.digest:
            return True
        return compare_step(turn, choice, unit, self.messages) is not None


def _words_of(messages: Sequence[Message], units: Sequence[Unit]) -> set[str]:
    """Return the words of the messages that these steps cover."""
    found: set[str] = set()
    for message in messages[units[0].start : units[-1].end]:
        found |= _words(message)
    return found


def _share(reply: Message, written: Collection[str]) -> float:
    """Return the share of a reply's words that were ``written``, from 0 to 1."""
    words = _words(reply)
    return len(words.intersection(written)) / len(words) if words else 0.0


def _words(message: Message) -> set[str]:
    """Return the words of a message: of its text and its calls, or else of its reasoning."""
    parts = [part for part in meaning_parts(message.content) if isinstance(part, str)]
    for call in message.tool_calls:
        parts += [call.name, _ESCAPED.sub(" ", call.arguments)]
    return set(_WORD.findall(" ".join(parts or [message.reasoning or ""]).casefold()))


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
