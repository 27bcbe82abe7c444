"""The re-entry of one session: which recorded call a request repeats, and what follows from it.

A request is matched by the set of minted ids that it echoes, then by its agent and first user text,
then by the recorded order. Up to the call at which the session goes on live, it gets the recorded
reply. In either case the recorded request stands for it in lineage (the *graft*), so that noise in
an earlier tool result changes no token of a later prompt. Later requests repeat what the harness
saw; those messages are replaced by the recorded ones before lineage sees them.

All of this follows from the calls of the new session in the store, so that a restarted proxy, or
another one on the same store, goes on with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from msgspec import structs

from bridle.proxy.dialects.wording import Wording
from bridle.proxy.replay.aliases import Aliases
from bridle.proxy.replay.grafted_body import GraftedBodies
from bridle.proxy.replay.judgement import Judge, Likeness, Verdict, pairs
from bridle.proxy.replay.recorded import RecordedCall, RecordedSession, echoed, renamed
from bridle.proxy.session.rules import EditedReply, Edits, ReplayRules
from bridle.proxy.session.session import Session
from bridle.proxy.wire.canonical import ApiError, Message, Request
from bridle.store.call import CallRow
from bridle.store.reading.queries import Reader
from bridle.store.records import Note, TokenIds

ParseRecorded = Callable[[bytes], Awaitable[Request]]
"""A function that parses the bytes of a recorded request as those of the request that came."""

DIVERGED: Final = "replay_diverged"
"""Name of the note on a call whose request differs from the recorded one; the detail shows it."""
HANDLE: Final = "replay_handle"
"""Name of the note on a call whose request has other names of what runs in the background."""
UNREAD: Final = "request_unread"
"""Name of the note on a request that only its upstream can read."""
REWORDED: Final = "replay_reworded"
"""Name of the note on a call whose upstream got the recorded words in the client's JSON."""
EDITED: Final = "replay_edited"
"""Name of the note on the first live call for each edit; the detail is the call's id or role. It is
also on the call whose reply was edited, with the detail ``reply``."""
LIVE: Final = "replay_live"
"""Name of the note on the live call that took a recorded call's place; the detail is its id."""
_KEY: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a session that re-enters another."""

    request: Request
    """The request for lineage and the engine."""
    notes: tuple[Note, ...] = ()
    replayed: RecordedCall | None = None
    """The recorded call whose reply is the answer; ``None`` if the engine is asked."""
    reply: EditedReply | None = None
    """The reply to give in its place."""
    prompt: TokenIds | None = None
    """The recorded ids of the prompt of a live call, ``uint32[P]``."""
    aliases: Aliases | None = None
    """The names that the reply must have, if any differ from the recorded ones."""
    refusal: ApiError | None = None
    """The error for a request that differs from the record."""
    body: bytes | None = None
    """The body for an upstream of the client's own dialect; ``None`` if it gets the client's."""

    @property
    def asks(self) -> bool:
        """Return whether an engine or another upstream is asked."""
        return self.replayed is None and self.refusal is None


class Replay:
    """The state of one session's re-entry."""

    def __init__(
        self,
        recorded: RecordedSession,
        branch: str | None,
        rules: ReplayRules,
        judge: Judge,
        reader: Reader,
    ) -> None:
        """``branch`` is the id of the recorded call at which the session goes on live.

        ``reader`` reads the new session. Raise ``ValueError`` if the branch cannot be replayed.
        """
        order = [call.id for call in recorded.calls]
        if branch is not None and branch not in order:
            raise ValueError(f"call {branch} is no complete call of the recorded session")
        if rules.edit != Edits() and branch is None:
            raise ValueError("an edit needs the call at which the session goes on")
        self.recorded = recorded
        texts = structs.replace(rules.edit, reply=None)
        self._edited_call = None if texts == Edits() else branch
        self._edited_reply = None
        if rules.edit.reply is not None and branch is not None:
            if texts != Edits():
                raise ValueError("edit either a reply or the texts of the call after it")
            self._edited_reply = recorded.by_id[branch].row.parent_call_id
            if self._edited_reply not in recorded.by_id:
                raise ValueError(f"call {branch} continues no call whose reply can be edited")
        self._prefix = frozenset(order if branch is None else order[: order.index(branch)])
        self._rules = rules
        self._judge = judge
        self._reader = reader
        self._names: dict[str, str] = {}
        """The id of the new call in place of each recorded one."""
        self._recorded_of: dict[str, str] = {}
        self._used: set[str] = set()
        self._own: set[str] = set()
        """Ids of the new session's calls that were read from the store."""
        self._read = False
        self._messages: dict[bytes, Message] = {}
        """Recorded messages by what the harness sends in their place."""
        self._tools: dict[bytes, tuple[dict[str, Any], ...]] = {}
        self._bodies = GraftedBodies()
        self.aliases = Aliases()
        """The names of what runs in the background."""
        self._began: float | None = None
        self._ended = False
        self._stopped: ApiError | None = None
        self._one_at_a_time = asyncio.Lock()

    async def step(
        self,
        session: Session,
        request: Request,
        body: bytes,
        agent: str | None,
        parse: ParseRecorded,
        wording: Wording | None = None,
    ) -> Step:
        """Return the answer to one request.

        ``wording`` is that of an upstream of the client's own dialect. Raise ``ValueError`` if the
        record is damaged.
        """
        async with self._one_at_a_time:
            step = await self._step(session, request, body, agent, parse, wording)
            if wording is None or not step.asks or _unread(request) is not None:
                return step
            worded = self._bodies.body(body, self.aliases, wording)
            if worded is None:
                return step
            return replace(step, body=worded, notes=(*step.notes, Note(REWORDED)))

    async def _step(
        self,
        session: Session,
        request: Request,
        body: bytes,
        agent: str | None,
        parse: ParseRecorded,
        wording: Wording | None,
    ) -> Step:
        all_echoed = echoed(body)
        known = session.calls | session.running | self._own
        if not self._read or not all_echoed <= known:
            await self._catch_up(session.id, request.dialect, parse, wording)
        if self._stopped is not None:
            return Step(request, refusal=self._stopped)
        if (unread := _unread(request)) is not None:
            return self._diverged(request, Verdict(Likeness.DIVERGED, unread))
        own = all_echoed & (known | self._own)
        if self._ended or not own <= self._recorded_of.keys():
            return self._live(request)
        echoes = frozenset(self._recorded_of[one] for one in own)
        found = await self._match(request, agent, echoes, parse)
        if found is not None:
            if wording is not None and found[0].id == self._edited_call:
                return Step(request, refusal=_no_edit("its service gets the agent's own requests"))
            step = self._matched(request, *found)
            if wording is not None and step.refusal is None:
                then = await asyncio.to_thread(self.recorded.request, found[0], self._names)
                self._bodies.learn(body, then, wording)
            return step
        if self._prefix <= self._used:
            return self._live(request)
        detail = f"no recorded call follows {self._latest(echoes)} and asks this"
        return self._diverged(request, Verdict(Likeness.DIVERGED, detail))

    @property
    def model(self) -> str | None:
        """The model that live calls ask instead of the one that the harness names."""
        return self._rules.model

    def answered(self, call: RecordedCall, call_id: str) -> None:
        """Record that the call ``call_id`` of the session has the place of a recorded one."""
        self._names[call.id] = call_id
        self._recorded_of[call_id] = call.id

    def response(self, call: RecordedCall) -> bytes:
        """Return the recorded bytes of the reply, with the new session's ids.

        This reads the store.
        """
        return self.recorded.response(call, self._names)

    def wait(self, call: RecordedCall, now: float) -> float:
        """Return the seconds until the reply of a recorded call is due.

        ``now`` is the time by a clock that only grows, in seconds.
        """
        if self._began is None:
            self._began = now
        if self._rules.pace == "instant":
            return 0.0
        ended = call.row.ended_at or call.row.started_at
        due = ended - self.recorded.calls[0].row.started_at
        return max(0.0, due - (now - self._began))

    @property
    def names(self) -> Mapping[str, str]:
        """The id of the new call in place of each recorded one."""
        return self._names

    async def _catch_up(
        self, session_id: str, dialect: str, parse: ParseRecorded, wording: Wording | None
    ) -> None:
        """Take up the session's calls in the store that this process has not processed."""
        self._read = True
        ids = await asyncio.to_thread(self._reader.call_ids, session_id)
        if self._own.union(self._recorded_of).issuperset(ids):
            return
        for row in await asyncio.to_thread(self._reader.calls, session_id):
            if row.id not in self._own and row.id not in self._recorded_of:
                recorded = self.recorded.by_id.get(self._take_up(row) or "")
                if recorded is not None and row.dialect == dialect:
                    await self._graft_again(row.id, recorded, parse, wording)
            self._own.add(row.id)

    def _take_up(self, row: CallRow) -> str | None:
        """Take up what a call's columns and notes record about the re-entry.

        Return the id of the recorded call in whose place it came.
        """
        noted = {note.name: note.detail for note in row.notes}
        place = row.replayed_call_id or noted.get(LIVE)
        if place is not None:
            self._used.add(place)
        if row.replayed_call_id is not None:
            self._names[row.replayed_call_id] = row.id
            self._recorded_of[row.id] = row.replayed_call_id
        if DIVERGED in noted and self._rules.on_divergence == "live":
            self._ended = True
        elif DIVERGED in noted and self._stopped is None:
            self._stopped = _stop(noted[DIVERGED])
        return place

    async def _graft_again(
        self, call_id: str, recorded: RecordedCall, parse: ParseRecorded, wording: Wording | None
    ) -> None:
        sent, then = await asyncio.to_thread(
            lambda: (
                self._reader.request_body(call_id),
                self.recorded.request(recorded, self._names),
            )
        )
        if sent != then:
            came, was = await parse(sent), await parse(then)
            self._learned(came, was)
            edited, _ = self._edited(recorded, was)
            self._graft(came, edited or was)
            if wording is not None:
                self._bodies.learn(sent, then, wording)

    async def _match(
        self, request: Request, agent: str | None, echoes: Collection[str], parse: ParseRecorded
    ) -> tuple[RecordedCall, Request, Verdict] | None:
        """Return the recorded call that the request repeats, its request, and their comparison."""
        able = [
            call
            for call in self.recorded.calls
            if call.echoes == echoes
            and call.row.dialect == request.dialect
            and self._follows_replayed(call)
        ]
        found: list[tuple[tuple[bool, bool, int], RecordedCall, Request, Verdict]] = []
        # A request that comes twice gets the recorded reply twice. A harness that asks again after
        # a broken stream may ask for a whole reply.
        able.sort(key=lambda call: (call.id in self._used, call.row.stream != request.stream))
        for call in able:
            body = await asyncio.to_thread(self.recorded.request, call, self._names)
            then = await parse(body)
            verdict = self._judge.request(self._with_recorded_names(request), then)
            key = (_agent(call) != agent, _first(then) != _first(request), verdict.likeness)
            if call.id not in self._used or verdict.follows:
                found.append((key, call, then, verdict))
            if verdict.follows and not any(key[:2]):
                break
        if not found:
            return None
        _, call, then, verdict = min(found, key=lambda one: one[0])
        return call, then, verdict

    def _follows_replayed(self, call: RecordedCall) -> bool:
        """Return whether a recorded call continues none, or one whose reply was replayed.

        A later call has another history: the new session's own. So has one that follows a reply
        which is edited.
        """
        if self._edited_reply is not None and call.id not in self._prefix:
            return False
        before = call.row.parent_call_id
        return before is None or before in self._names or before not in self.recorded.by_id

    def _matched(
        self, request: Request, call: RecordedCall, then: Request, verdict: Verdict
    ) -> Step:
        named = verdict.likeness is Likeness.HANDLE and self._learned(request, then)
        if not (verdict.follows or named):
            return self._diverged(request, verdict, call)
        self._used.add(call.id)
        edited, notes = self._edited(call, then)
        if edited is None:
            return Step(request, refusal=_no_edit("its request has not all that is edited"))
        then = edited
        self._graft(request, then)
        grafted = structs.replace(
            request,
            messages=then.messages,
            tools=then.tools,
            prompt=then.prompt,
            instructions=then.instructions,
            notes=then.notes,
        )
        if call.id == self._edited_reply:
            noted = (*_notes(verdict), Note(EDITED, "reply"))
            reply = self._rules.edit.reply
            return Step(grafted, noted, replayed=call, reply=reply, aliases=self.aliases)
        if call.id in self._prefix:
            return Step(grafted, _notes(verdict), replayed=call, aliases=self.aliases)
        prompt = None if notes else call.prompt
        notes = (*_notes(verdict), *notes, Note(LIVE, call.id))
        return Step(self._asking(grafted), notes, prompt=prompt, aliases=self.aliases)

    def _edited(self, call: RecordedCall, then: Request) -> tuple[Request | None, tuple[Note, ...]]:
        """Return the recorded request with the edits at this call, and a note on each.

        The request is ``None`` if it lacks a text that is edited.
        """
        if call.id != self._edited_call:
            return then, ()
        edit, notes = self._rules.edit, []
        results = {
            renamed(name.encode(), self._names).decode(): text
            for name, text in edit.tool_results.items()
        }
        system, messages = edit.system, list(then.messages)
        for place, message in enumerate(messages):
            text = None
            if message.role == "system":
                text, system = system, None
            elif message.role == "tool":
                text = results.pop(message.tool_call_id or "", None)
            if text is not None:
                messages[place] = structs.replace(message, content=text)
                notes.append(Note(EDITED, message.tool_call_id or message.role))
        missing = bool(results) or system is not None
        return None if missing else structs.replace(then, messages=tuple(messages)), tuple(notes)

    def _live(self, request: Request) -> Step:
        messages = request.messages
        if self._messages or self.aliases:
            messages = tuple(
                self._messages.get(_KEY(one)) or self.aliases.recorded(one) for one in messages
            )
        tools = self._tools.get(_KEY(request.tools), request.tools)
        live = self._asking(structs.replace(request, messages=messages, tools=tools))
        return Step(live, aliases=self.aliases)

    def _asking(self, request: Request) -> Request:
        model = self._rules.model
        return request if model is None else structs.replace(request, model=model)

    def _with_recorded_names(self, request: Request) -> Request:
        if not self.aliases:
            return request
        return structs.replace(
            request, messages=tuple(map(self.aliases.recorded, request.messages))
        )

    def _learned(self, sent: Request, recorded: Request) -> bool:
        """Learn the names that tool results have. Return whether none contradicts another."""
        texts = (
            (one.content, other.content)
            for one, other in pairs(sent, recorded)
            if one.role == "tool"
        )
        return all(
            self.aliases.learn(was, now)
            for now, was in texts
            if isinstance(now, str) and isinstance(was, str)
        )

    def _graft(self, sent: Request, recorded: Request) -> None:
        """Remember the recorded messages in whose place the harness sends others."""
        for one, other in pairs(sent, recorded):
            if one != other:
                self._messages[_KEY(one)] = other
        if sent.tools != recorded.tools:
            self._tools[_KEY(sent.tools)] = recorded.tools

    def _diverged(
        self, request: Request, verdict: Verdict, call: RecordedCall | None = None
    ) -> Step:
        where = "" if call is None else f"turn {call.turn}, {verdict.likeness.name.lower()}: "
        note = Note(DIVERGED, f"{where}{verdict.detail}")
        if self._rules.on_divergence == "live":
            self._ended = True
            step = self._live(request)
            return Step(step.request, (note,), aliases=self.aliases)
        self._stopped = _stop(note.detail)
        return Step(request, (note,), refusal=self._stopped)

    def _latest(self, echoes: Collection[str]) -> str:
        turns = [self.recorded.by_id[one].turn for one in echoes if one in self.recorded.by_id]
        return f"turn {max(turns)}" if turns else "the beginning"


def _unread(request: Request) -> str | None:
    """Return the reason why the request was not read, if it was not."""
    return next((note.detail for note in request.notes if note.name == UNREAD), None)


def _no_edit(problem: str) -> ApiError:
    message = (
        f"the turn at which the session goes on cannot be edited: {problem}; name texts of that "
        "turn, and with --model a model that an engine serves"
    )
    return ApiError("invalid_request", message, status=400)


def _stop(detail: str) -> ApiError:
    message = (
        f"the session no longer follows its record ({detail}); "
        "re-enter it at an earlier turn, or with --on-divergence live"
    )
    return ApiError("invalid_request", message, status=400)


def _notes(verdict: Verdict) -> tuple[Note, ...]:
    if verdict.likeness is Likeness.SAME:
        return ()
    name = HANDLE if verdict.likeness is Likeness.HANDLE else "replay_noise"
    return (Note(name, verdict.detail),)


def _agent(call: RecordedCall) -> str | None:
    said = call.row.conversation
    return None if said is None or said.lineage is None else said.lineage.digests.agent


def _first(request: Request) -> object:
    return next((one.content for one in request.messages if one.role == "user"), None)
