"""The search for the earlier call that a request continues.

A session's turns form a tree (``proxy/session/turn.py``). The search follows a request down from
the roots: its first steps must mean the same as a root's request, the next step must be that call's
reply, the steps after it must mean the same as a child's request, and so on. The deepest call whose
reply is reached is the *base*. Echoed values that the proxy minted decide between equal replies.
They also name the *parent* if the history above it was edited or compacted away
(``proxy/session/rewritten.py``); the link is then a break and has a reason.

Agents that share a session cannot adopt each other's calls: a different system prompt, tool set,
first message or reply is a different path, an echoed id admits only the call that minted it, and
among equals a path with the same system prompt, tools and agent name wins.

The search is pure: it uses no I/O and no clocks. A request may echo a call that is not over yet (a
client cut a stream and went on at once), or a call that another process recorded. ``Link.unknown``
names such calls: wait for them or load them, add them to the index, and search again. A Responses
request with ``previous_response_id`` is expected with the stored conversation put before its
messages.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from itertools import chain
from operator import attrgetter

from msgspec import structs

from bridle.proxy.session.digests import value_digest
from bridle.proxy.session.folded_turns import has_folded, without_folds
from bridle.proxy.session.match import (
    WHOLE,
    Place,
    compare_step,
    names_own_calls,
    own_head,
    same_call,
)
from bridle.proxy.session.rewritten import Reworded, Rewritten
from bridle.proxy.session.trails import Step, Trail, Trails, Ways
from bridle.proxy.session.turn import Below, Link, Turn, TurnIndex, chained
from bridle.proxy.wire.canonical import Message, Request
from bridle.proxy.wire.histories import History
from bridle.proxy.wire.minting import call_id_of
from bridle.store.records import BreakReason, CallStatus, RequestDigests

COMPACTED_BELOW = 2 / 3
"""The share of its former steps, and of the replies in them, below which a rewritten history counts
as a compaction."""

_FEW = 8
"""Number of calls at one place above which those are looked up that were asked the same."""

_digest, _form, _minted = attrgetter("digest"), attrgetter("form"), attrgetter("minted")
_end = attrgetter("end")
_NO_TOOLS = value_digest(())
_PLAIN_ASK = value_digest([None, None])


class Search:
    """The search for a request's base and parent.

    The history of the base is unchanged, and the reply of the parent is echoed last.
    """

    def __init__(
        self,
        index: TurnIndex,
        request: Request,
        agent: str | None,
        trails: Trails | None = None,
        history: History | None = None,
    ) -> None:
        """Prepare the search.

        ``agent`` is the harness's own name of the (sub-)agent, if its headers have one. ``trails``
        are those of ``index``; what they share with the request is not read again. ``history`` is
        the body that the request's messages were read from, to be remembered with them.
        """
        self.index = index
        self._trails = trails
        self.request = request
        named = request.previous_response_id
        self.previous = None if named is None else call_id_of(named)
        system, system_form, self.head = index.digester.system(request.messages)
        prefill = _prefill(request, index) if "continue_final_message" in request.extra else ()
        steps = request.messages[:-1] if prefill else request.messages
        self.trail = self._read(steps, history)
        if self.unfolded is not None:
            self.unfolded += request.messages[len(steps) :]
            self.request = structs.replace(request, messages=self.unfolded)
        self.units, self.digests = self.trail.units, self.trail.digests
        asked = request.tool_choice is not None or request.response_format is not None
        arguments = request.template_arguments
        self.seen = RequestDigests(
            system=system,
            system_form=system_form,
            tools=value_digest(request.tools) if request.tools else _NO_TOOLS,
            ask=value_digest([request.tool_choice, request.response_format, *prefill])
            if asked or prefill
            else _PLAIN_ASK,
            units=self.digests,
            forms=self.trail.forms,
            depth=len(self.units),
            agent=agent,
            arguments=json.dumps(arguments, sort_keys=True) if arguments else None,
            prefill="".join(prefill),
        )
        self.cut: list[Place] = []
        """The places of replies that the request echoes only in part, after an unchanged
        history."""

    def _read(self, messages: tuple[Message, ...], history: History | None) -> Trail:
        """Cut the messages into steps, and take those that a trail shares from it."""
        digester, trails = self.index.digester, self._trails
        self.unfolded: tuple[Message, ...] | None = None
        """The messages, if turns that the client folded into others were taken out of them."""
        self._before: Trail | None = None
        self._shared = self._known = kept = 0
        trail = Trail(messages, history=history)
        if trails is not None:
            self._before, self._shared = trails.closest(messages)
        if has_folded(messages[max(0, self._shared - 1) :]):
            unfolded = without_folds(messages, self.index)
            if unfolded != messages:
                self.unfolded = trail.messages = messages = unfolded
                if trails is not None:
                    self._before, self._shared = trails.closest(messages)
        before = self._before
        trail.look_for_text(before, self._shared)
        if before is None or not before.units or before.units[0].start != self.head:
            trail.units = digester.units(messages, self.head)
            trail.digests = tuple(map(_digest, trail.units))
            trail.forms = tuple(map(_form, trail.units))
            return trail
        # The last shared message may belong to one step with those after it.
        kept = bisect_left(before.units, self._shared, key=_end)
        units = before.units[:kept]
        last = next((unit.message for unit in reversed(units) if unit.message is not None), None)
        first = units[-1].end if units else self.head
        new = digester.units(messages, first, last)
        trail.units = units + new
        trail.digests = before.digests[:kept] + tuple(map(_digest, new))
        trail.forms = before.forms[:kept] + tuple(map(_form, new))
        trail.line = trails.usable(before, kept) if trails is not None else ()
        trail.expanded = before.expanded
        if before.removals == self.index.removals:
            trail.written = before.written.first(self._shared)
            self._known = kept
        return trail

    def link(self) -> Link:
        """Return the request's link to its session."""
        link, echoes = self._found()
        turns = self.index.turns
        # The ids in the steps of a trail were known, and no call has been removed since.
        ids = list(chain.from_iterable(map(_minted, self.units[self._known :])))
        if self.previous is not None:
            ids.append(self.previous)
        unknown = tuple(dict.fromkeys([one for one in ids if one not in turns])) if ids else ()
        if self._trails is not None and not unknown:
            self._trails.keep(self.trail, self._before, self._shared)
            link = structs.replace(link, written=self.trail.written)
        if self.unfolded is not None:
            link = structs.replace(link, unfolded=self.unfolded)
        if unknown or echoes:
            return structs.replace(link, unexplained=True, unknown=unknown)
        return link

    def _found(self) -> tuple[Link, bool]:
        """Return the link, and whether the request shows a reply that no turn explains."""
        base = self._deepest()
        link = self._unbroken(base)
        changed = Rewritten(self.index, self.request.messages, self.units, self.seen, self.cut)
        reworded, named = changed.asked_before(base, link), None
        echoes = self._replies_after(0 if base is None else base.end)
        if echoes:
            end = 0 if base is None else base.end
            named = changed.echoed_last(base, end if reworded is None else reworded.at)
        if named is not None:
            link = self._broken(link, named)
        elif base is None and (summariser := changed.summariser()) is not None:
            link = self._compacted(link, summariser)
        elif reworded is not None:
            link = self._reworded(link, reworded)
            echoes = self._replies_after(reworded.at + 1)
        elif base is None and self.index.unrelated:
            link = structs.replace(link, failed=changed.failed(), quoted=changed.quoted())
        if link.parent is not None and not link.parent.choices:
            link = structs.replace(link, break_reason=BreakReason.PARENT_WITHOUT_IDS)
        return link, echoes

    def _replies_after(self, start: int) -> bool:
        """Return whether a step from ``start`` on is an assistant turn."""
        return any(unit.message is not None for unit in self.units[start:])

    # — the base: following the request down from the roots —

    def _deepest(self) -> Place | None:
        line, self.trail.line = self.trail.line, ()
        return self._deepest_of(self._places(line)) or (
            self._deepest_of(self._places(())) if line else None
        )

    def _deepest_of(self, places: list[Place]) -> Place | None:
        while places:
            end, deepest = 0, places[:0]
            for place in places:
                if place.end > end:
                    end, deepest = place.end, []
                if place.end == end and not self._foreign(place):
                    deepest.append(place)
            if len(deepest) == 1:
                return deepest[0]
            if deepest:
                if self.index.unrelated:
                    deepest = self._latest_first(deepest)
                return max(deepest, key=self._rank)
            places = [place for place in places if place.end < end]
        return None

    def _latest_first(self, places: list[Place]) -> list[Place]:
        """Return the places in the order in which their conversations went on, the latest first."""
        ids = {place.turn.call_id for place in places}
        order: dict[str, int] = {}
        for call_id in reversed(self.index.turns):
            if call_id in ids:
                order[call_id] = len(order)
                if len(order) == len(ids):
                    break
        return sorted(places, key=lambda place: order[place.turn.call_id])

    def _places(self, line: tuple[Step, ...]) -> list[Place]:
        """Return the place of every reply that the request repeats whole.

        The request repeats the reply's whole history, too. With a ``line``, the places before its
        last one are left out.
        """
        found: list[Place] = []
        open_: list[tuple[Below, int]] = [(None, 0)]
        if line:
            found = [line[-1].place]
            open_ = [((found[0].turn.call_id, found[0].choice), found[0].end)]
        ways = Ways(self.trail, line)
        digests, index = self.digests, self.index.found
        while open_:
            below, start = open_.pop()
            if start >= len(digests):
                continue
            before, cut = len(found), len(self.cut)
            keys = ("next", below, digests[start]), ("next", below, b"")
            turns = (*index.get(keys[0], ()), *index.get(keys[1], ()))
            longest = max([len(turn.seen.units) for turn in turns], default=0)
            reach = start + longest + 1
            for turn in turns if len(turns) <= _FEW else self._asked(below, start, longest):
                self._add_places(turn, start, found, open_)
            if ways.single and len(found) == before + 1 and len(self.cut) == cut:
                ways.add(Step(found[-1], max(reach, ways.reach)), keys)
            else:
                ways.single = False
        ways.keep(self.index)
        return found

    def _asked(self, below: Below, start: int, longest: int) -> tuple[Turn, ...]:
        """Return the turns at a place whose requests the steps from ``start`` on begin with.

        ``longest`` is the number of steps of the longest of them. The cost grows with that number
        and not with the number of turns at the place.
        """
        end = min(start + longest, len(self.digests))
        chain, found = chained(self.digests[start:end]), self.index.found
        return tuple([turn for one in chain for turn in found.get(("asked", below, one), ())])

    def _add_places(
        self, turn: Turn, start: int, found: list[Place], open_: list[tuple[Below, int]]
    ) -> None:
        """Add the places of the replies of ``turn`` that are repeated, whole or in part.

        The steps from ``start`` on must be the turn's own new steps, and the one after them repeats
        the reply.
        """
        end, turns = start + len(turn.seen.units), self.index.turns
        unit = self.units[end] if end < len(self.units) else None
        if unit is None or unit.message is None:
            return
        minted = unit.minted and [one for one in unit.minted if one in turns]
        if minted and turn.call_id not in minted:
            return
        unlike, one = self.index.unlike, (turn.call_id, unit.form)
        if one in unlike or self.digests[start:end] != turn.seen.units:
            return
        before = len(found), len(self.cut)
        for choice, reply in enumerate(turn.choices):
            same = reply.digest == unit.digest
            match = WHOLE if same else compare_step(turn, choice, unit, self.request.messages)
            if match is None:
                continue
            place = Place(turn, choice, end + 1, match, bool(minted))
            if match.part == "prefix":
                self.cut.append(place)
                continue
            found.append(place)
            open_.append(((turn.call_id, choice), end + 1))
        if before == (len(found), len(self.cut)):
            unlike.add(one)

    def _rank(self, place: Place) -> tuple[object, ...]:
        """Return the rank of a place.

        The greatest is the best, and among equals the first found stays.
        """
        turn, seen = place.turn, self.seen
        return (
            turn.call_id == self.previous,
            turn.seen.system == seen.system,
            turn.seen.tools == seen.tools,
            turn.seen.agent == seen.agent,
            names_own_calls(turn, place.choice, self.units[place.end - 1]),
            not self._answered_below(place) if self.index.unrelated else self._asked_below(place),
            self._leads_on(place),
            self.index.unrelated or not self.index.echoed(turn),
            turn.status is CallStatus.COMPLETE,
        )

    def _asked_below(self, place: Place) -> bool:
        """Return True if the same question has already been asked after this place.

        Under other instructions or tools than the place's own, such a call was recorded from the
        root.
        """
        turn = place.turn
        rest = structs.replace(self.seen, units=self.digests[place.end :])
        return bool(self.index.asked((turn.call_id, place.choice), rest)) or any(
            asked.parent_call_id == turn.call_id for asked in self.index.asked(None, self.seen)
        )

    def _answered_below(self, place: Place) -> bool:
        """Return True if the same question has already been answered there.

        The answer was given in a run of an equal conversation.
        """
        rest = structs.replace(self.seen, units=self.digests[place.end :])
        asked = self.index.asked((place.turn.call_id, place.choice), rest)
        return any(turn.status is CallStatus.COMPLETE for turn in asked)

    def _leads_on(self, place: Place) -> bool:
        """Return True if a reply that is echoed later was given below this one.

        If several samples have the same content, this one was then used.
        """
        return any(
            self.index.descends(turn, place.turn)
            for unit in self.units[place.end :]
            if unit.message is not None
            for turn in self.index.replied(unit.digest)
        )

    def _foreign(self, place: Place) -> bool:
        """Return True if the call is another agent's.

        It has other instructions and other tools, and no echoed id connects it to the request.
        """
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

    # — the verdict —

    def _unbroken(self, base: Place | None) -> Link:
        """Return the link of a request that continues ``base``, or starts a conversation."""
        request, seen = self.request, self.seen
        textual = self.trail.textual == len(self.trail.messages)
        if base is None:
            return Link(seen=seen, tail=request.messages, head=self.head, text_only=textual)
        end, before = base.end, base.turn.seen
        link = Link(
            seen=seen,
            parent=base.turn,
            rule="minted_id" if base.minted else "content",
            confidence=self._confidence(base),
            tail=request.messages,
            head=self.head,
            text_only=textual,
        )
        differs = self._differs(base)
        system, tools = before.system != seen.system, before.tools != seen.tools
        if system or tools:
            # They stand before everything else in the prompt: nothing of the base's tokens can be
            # kept.
            reason = BreakReason.SYSTEM_CHANGED if system else BreakReason.TOOLS_CHANGED
            differs |= {"system"} if system else set()
            differs |= {"tools"} if tools else set()
            return structs.replace(link, differs=tuple(sorted(differs)), break_reason=reason)
        return structs.replace(
            link,
            seen=structs.replace(seen, units=self.digests[end:], forms=seen.forms[end:]),
            base=base.turn,
            choice=base.choice,
            differs=tuple(sorted(differs)),
            tail=request.messages[self.units[end - 1].end :],
        )

    def _broken(self, link: Link, named: Place) -> Link:
        """Return the link of a request that goes on from ``named`` after a rewritten history."""
        seen, before = self.seen, named.turn.seen
        if link.break_reason is not None and not own_head(named.turn, seen):
            reason = link.break_reason
        elif named.match.part == "prefix":
            reason = BreakReason.TRUNCATED
        elif named.end - 1 < COMPACTED_BELOW * before.depth and self._leaves_out(named):
            reason = BreakReason.COMPACTED
        else:
            reason = BreakReason.EDITED
        return structs.replace(
            link,
            parent=named.turn,
            rule="minted_id" if named.minted else "content",
            confidence=0.95 if named.minted else 0.7,
            differs=tuple(sorted({*link.differs, "history", *named.match.differs})),
            break_reason=reason,
        )

    def _leaves_out(self, named: Place) -> bool:
        """Return whether replies above ``named`` are missing from the request.

        Fewer steps do not show it, because a client may have joined them.
        """
        steps = self.units[: named.end - 1]
        echoed = {call_id for unit in steps for call_id in unit.minted}
        said = {unit.digest for unit in steps}
        above = kept = 0
        turn = self.index.above(named.turn)
        while turn is not None:
            above += 1
            kept += turn.call_id in echoed or any(one.digest in said for one in turn.choices)
            turn = self.index.above(turn)
        return kept < COMPACTED_BELOW * above or not above

    def _compacted(self, link: Link, summariser: Turn) -> Link:
        return structs.replace(
            link,
            parent=summariser,
            rule="content",
            confidence=0.6,
            differs=("history",),
            break_reason=BreakReason.COMPACTED,
        )

    def _reworded(self, link: Link, found: Reworded) -> Link:
        """Return the link of a request that has the latest reply in the harness's own words."""
        turn, reason = found.turn, BreakReason.REWORDED
        if not own_head(turn, self.seen):
            other = turn.seen.system != self.seen.system
            reason = BreakReason.SYSTEM_CHANGED if other else BreakReason.TOOLS_CHANGED
        return structs.replace(
            link,
            parent=turn,
            rule="position",
            confidence=0.5 + 0.4 * found.share,
            differs=tuple(sorted({*link.differs, "history"})),
            break_reason=reason,
        )

    def _differs(self, place: Place) -> set[str]:
        """Return the names of the differences in form between this request and the base.

        The base is compared by its request and its reply.
        """
        seen, found, echo = place.turn.seen, set(place.match.differs), self.units[place.end - 1]
        if echo.form != place.turn.choices[place.choice].form:
            compared = compare_step(place.turn, place.choice, echo, self.request.messages)
            found |= frozenset() if compared is None else compared.differs
        first = place.end - 1 - len(seen.units)
        for form, unit in zip(seen.forms, self.units[first:], strict=False):
            if form != unit.form:
                found.add(f"{unit.role}_form")
        if seen.system_form != self.seen.system_form:
            found.add("system_form")
        return found

    def _confidence(self, place: Place) -> float:
        if place.minted or place.turn.call_id == self.previous:
            return 1.0
        turn = place.turn
        for other in self.index.found["reply", turn.choices[place.choice].digest]:
            alike = other is not turn and other.seen.units == turn.seen.units
            if alike and same_call(other.base, turn.base):
                return 0.5
        return 0.95


def _prefill(request: Request, index: TurnIndex) -> tuple[str, ...]:
    """Return the text that the reply goes on from, as the only item.

    The tuple is empty if the reply begins a turn of its own, or goes on from a recorded reply.
    """
    if not request.extra["continue_final_message"] or not request.messages:
        return ()
    last = request.messages[-1]
    if last.role != "assistant" or index.replied(index.digester.reply(last)[0]):
        return ()
    content = last.content
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    return (content,) if content else ()
