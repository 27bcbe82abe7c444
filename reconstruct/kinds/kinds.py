"""What each recorded call was for, told from the record alone.

A session's calls fall into *lines*: a call and everything that continues it, up to where lineage
saw a conversation begin. The line that does the work is ``main``; a line beside it needs evidence
to be anything else, and without any it stays ``unknown`` (which is trained: nothing says that the
policy did not act there). A kind that the record already tells is kept, and what a person said of a
call (``bridle kind``) counts before everything else, also for what it tells of other calls.

What each rule goes by is in its evidence, for ``bridle show`` and for whoever doubts it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from bridle.reconstruct.conversation import digests, new_messages, repeats, tools
from bridle.store.reading.queries import CallRow
from bridle.store.reading.summaries import SUMMARY_LENGTH
from bridle.store.records import BreakReason, CallKind, CallStatus, ToolCall

TASK_LENGTH = 16
"""A tool call's argument of at least so many characters that opens a new conversation, as a user
message of its own, is a task that was handed on."""

_SHORTENED = (BreakReason.COMPACTED, BreakReason.EDITED)
"""How a conversation differs from the one it goes on from, when something was left out."""

_TAG = re.compile(r"<(/?)(\w+)>")
"""Some harnesses ask for a summary inside a tag and pass on what is in it."""

_ROLE_ARGUMENTS = ("subagent_type", "agent_type", "agent_name", "agent")
"""Where the harnesses' delegating tools name the sub-agent."""

_REQUEST_KINDS: Mapping[str, CallKind] = {
    "compaction": CallKind.COMPACTION,
    "compact": CallKind.COMPACTION,
}
"""Codex's own word for a request, in its ``x-codex-turn-metadata``."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A call's kind, and why."""

    kind: CallKind
    evidence: str
    """Stable words; empty when the kind is ``unknown``."""
    role: str | None = None


def with_kinds(calls: Sequence[CallRow]) -> list[CallRow]:
    """The calls of one session with their kinds filled in, in the same order."""
    verdicts = classify(calls)
    return [_told_apart(call, verdicts[call.id]) for call in calls]


def _told_apart(call: CallRow, verdict: Verdict) -> CallRow:
    if call.kind_set is not None:
        return call.with_kind(verdict.kind, verdict.role)
    if call.kind is verdict.kind:
        return call
    return call.with_kind(verdict.kind, call.role or verdict.role)


def classify(calls: Sequence[CallRow]) -> dict[str, Verdict]:
    """The kind of every call of one session, by call id."""
    lines = _lines(calls)
    verdicts: dict[str, Verdict] = {}
    for call in calls:
        told = _told(call)
        if told is not None:
            verdicts[call.id] = told
    delegated = list(_delegated(lines)) if len(lines) > 1 else []
    handed_on = {line.root.id for line, _ in delegated}
    for call_id in _summarisers(calls, handed_on):
        verdicts.setdefault(
            call_id, Verdict(CallKind.COMPACTION, "a shortened conversation begins with its reply")
        )
    for call_id in _replaced(calls):
        verdicts.setdefault(
            call_id, Verdict(CallKind.RETRY, "it did not complete and was asked again")
        )
    for line, verdict in delegated:
        line.give(verdict, verdicts)
    worked = [line for line in lines if line.uses_tools]
    for line in lines:
        aside = _aside(line, lines, worked)
        if aside is not None:
            line.give(Verdict(CallKind.SIDE, aside), verdicts)
    for call in _digressions(calls):
        verdicts.setdefault(
            call.id, Verdict(CallKind.SIDE, "asked with other tools or instructions, then left")
        )
    _settle(lines, verdicts)
    return {call.id: verdicts.get(call.id, _UNKNOWN) for call in calls}


_UNKNOWN = Verdict(CallKind.UNKNOWN, "")


class _Line:
    """A conversation: the call that began it, and every call that goes on from there."""

    def __init__(self, root: CallRow) -> None:
        self.calls = [root]

    @property
    def root(self) -> CallRow:
        return self.calls[0]

    @property
    def head(self) -> tuple[bytes, bytes]:
        """Digests of the instructions and of the tools that it began with."""
        return digests(self.root)

    @property
    def uses_tools(self) -> bool:
        return bool(tools(self.root))

    def give(self, verdict: Verdict, verdicts: dict[str, Verdict]) -> None:
        for call in self.calls:
            verdicts.setdefault(call.id, verdict)


def _lines(calls: Sequence[CallRow]) -> list[_Line]:
    """Lines in the order in which they began."""
    lines: list[_Line] = []
    line_of: dict[str, _Line] = {}
    for call in calls:
        line = line_of.get(call.parent_call_id or "")
        if line is None:
            line = _Line(call)
            lines.append(line)
        else:
            line.calls.append(call)
        line_of[call.id] = line
    return lines


def _told(call: CallRow) -> Verdict | None:
    """What a person says, the proxy recorded, or the harness says in its headers."""
    if call.kind_set is not None:
        return Verdict(call.kind_set, f"set by {call.kind_by}", call.role_set)
    if call.kind is not CallKind.UNKNOWN:
        return Verdict(call.kind, "recorded", call.role)
    if agent := call.headers.get("x-claude-code-agent-id"):
        return Verdict(CallKind.SUBAGENT, "x-claude-code-agent-id", agent)
    if parent := call.headers.get("x-parent-session-id"):
        own = call.headers.get("x-session-id")
        if own is not None and own != parent:
            return Verdict(CallKind.SUBAGENT, "x-parent-session-id", own)
    metadata = call.headers.get("x-codex-turn-metadata", "")
    for word, kind in _REQUEST_KINDS.items():
        if f'"request_kind":"{word}"' in metadata.replace(" ", ""):
            return Verdict(kind, "x-codex-turn-metadata")
    return None


def _summarisers(calls: Sequence[CallRow], handed_on: Collection[str]) -> set[str]:
    """Calls whose reply a shortened conversation quotes, and those that asked the same in vain.

    ``handed_on`` are roots that somebody delegated: what they quote is their task.
    """
    continued = {call.parent_call_id for call in calls if call.break_reason is None}
    written = _Written()
    found: set[str] = set()
    for call in calls:
        begins = call.parent_call_id is None and call.id not in handed_on
        if begins or call.break_reason in _SHORTENED:
            found |= written.quoted(call, begins)
        if call.id not in continued:
            written.add(call)
    return found | _asked_alike([call for call in calls if call.id in found], calls)


class _Written:
    """Replies that nothing goes on from. A text that many shortened conversations have is compared
    with each of them once."""

    def __init__(self) -> None:
        self._replies: list[tuple[CallRow, list[str]]] = []
        self._read: dict[tuple[str, _Asked], tuple[int, set[str]]] = {}
        """By text: how many replies it was compared with, and whose it quotes."""

    def add(self, call: CallRow) -> None:
        texts = _summary(call)
        if texts:
            self._replies.append((call, texts))

    def quoted(self, call: CallRow, begins: bool) -> set[str]:
        """The calls whose reply ``call`` has as a summary."""
        if not self._replies:
            return set()
        tail = new_messages(call) or ()
        found: set[str] = set()
        for role in ("user", "system", "assistant"):
            asked = _Asked(digests(call), begins, role == "assistant")
            for text in _texts(tail, (role,)):
                if len(text) >= SUMMARY_LENGTH:
                    found |= self._quoted(text, asked)
        return found

    def _quoted(self, text: str, asked: _Asked) -> set[str]:
        compared, found = self._read.get((text, asked), (0, set()))
        for call, summaries in islice(self._replies, compared, None):
            if asked.allows(call) and any(summary in text for summary in summaries):
                found.add(call.id)
        self._read[text, asked] = len(self._replies), found
        return found


class _Asked(NamedTuple):
    """Who has a text, as far as that tells whose reply it may quote."""

    head: tuple[bytes, bytes]
    begins: bool
    spoken: bool
    """It stands there as the assistant's own."""

    def allows(self, written: CallRow) -> bool:
        alike = digests(written) == self.head
        if self.begins and (alike or tools(written)):
            return False  # An answer that was pasted, for all we know.
        return not (self.spoken and alike)


def _summary(call: CallRow) -> list[str]:
    """What a conversation may quote of a reply that is long enough to be a summary: all of it, or
    the inside of a tag."""
    if not call.replies or _calls_tools(call):
        return []
    reply = str(call.replies[0].content or "").strip()
    return [text for text in (reply, *_tagged(reply)) if len(text) >= SUMMARY_LENGTH]


def _tagged(text: str) -> Iterator[str]:
    """What stands between an opening tag and the first that closes it, one after another."""
    tags = list(_TAG.finditer(text))
    closing: dict[str, int] = {}
    closed_by: list[int | None] = [None] * len(tags)
    for number in range(len(tags) - 1, -1, -1):
        slash, name = tags[number].groups()
        if slash:
            closing[name] = number
        else:
            closed_by[number] = closing.get(name)
    number = 0
    while number < len(tags):
        end = closed_by[number]
        if end is not None:
            yield text[tags[number].end() : tags[end].start()].strip()
            number = end
        number += 1


def _asked_alike(summarisers: Sequence[CallRow], calls: Sequence[CallRow]) -> set[str]:
    """Calls of the same parent as a summariser that end with the same instruction."""
    asked = {(call.parent_call_id, _last_given(call)) for call in summarisers}
    if not asked:
        return set()
    return {
        call.id
        for call in calls
        if not _calls_tools(call) and (call.parent_call_id, _last_given(call)) in asked
    }


def _calls_tools(call: CallRow) -> bool:
    return bool(call.replies) and bool(call.replies[0].tool_calls)


def _last_given(call: CallRow) -> str:
    return next(reversed(list(_given(new_messages(call) or ()))), call.id)


def _given(messages: Iterable[Mapping[str, object]]) -> Iterable[str]:
    """The texts of user and system messages."""
    return _texts(messages, ("user", "system"))


def _texts(messages: Iterable[Mapping[str, object]], roles: Sequence[str]) -> Iterable[str]:
    for message in messages:
        if message.get("role") not in roles:
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        yield from (str(part["text"]) for part in parts if part.get("text"))


def _delegated(lines: Sequence[_Line]) -> Iterable[tuple[_Line, Verdict]]:
    """Lines whose task, word for word, is what an earlier tool call of another line asked for."""
    asked: dict[str, tuple[_Line, CallRow, str]] = {}
    calls = [(call, line) for line in lines for call in line.calls]
    for call, line in sorted(calls, key=lambda pair: pair[0].started_at):
        if call is line.root and call.parent_call_id is None:
            given = [text.strip() for text in _given(new_messages(call) or ())]
            for other, delegating, role in (asked[text] for text in given if text in asked):
                if other is not line:
                    evidence = f"its task is an argument of a tool call of {delegating.id}"
                    yield line, Verdict(CallKind.SUBAGENT, evidence, role)
                    break
        for tool_call in call.replies[0].tool_calls if call.replies else ():
            for text, role in _tasks(tool_call):
                asked[text] = (line, call, role)


def _tasks(tool_call: ToolCall) -> Iterable[tuple[str, str]]:
    """The longer texts among a tool call's arguments, each with the name of who is to do it."""
    try:
        arguments = json.loads(tool_call.arguments)
    except ValueError:
        return
    if isinstance(arguments, dict):
        role = next((arguments[key] for key in _ROLE_ARGUMENTS if key in arguments), None)
        for value in arguments.values():
            if isinstance(value, str) and len(value.strip()) >= TASK_LENGTH:
                yield value.strip(), str(role or tool_call.name)


def _replaced(calls: Sequence[CallRow]) -> set[str]:
    """Calls that ended badly and that another call asks again."""
    bad = {call.id for call in calls if call.status is not CallStatus.COMPLETE}
    if not bad:
        return bad
    return {call_id for call in calls if (call_id := repeats(call)) in bad and call_id is not None}


def _aside(line: _Line, lines: Sequence[_Line], worked: Sequence[_Line]) -> str | None:
    """Why a line that nothing continues is beside the work: its evidence."""
    if len(line.calls) > 1 or line.uses_tools or not worked or line.root.parent_call_id:
        return None
    others = [other for other in lines if other is not line and len(other.calls) > 1]
    if not others:
        return None
    system, _ = line.head
    if all(system != other.head[0] for other in worked):
        return "one call without tools, under instructions of its own"
    return None


def _digressions(calls: Sequence[CallRow]) -> list[CallRow]:
    """Calls that leave a conversation under another head, while it goes on without them."""
    children: dict[str, list[CallRow]] = {}
    for call in calls:
        if call.parent_call_id is not None:
            children.setdefault(call.parent_call_id, []).append(call)
    changed = (BreakReason.SYSTEM_CHANGED, BreakReason.TOOLS_CHANGED)
    return [
        call
        for siblings in children.values()
        for call in siblings
        if call.break_reason in changed
        and call.id not in children
        and any(other.break_reason not in changed for other in siblings)
    ]


def _settle(lines: Sequence[_Line], verdicts: dict[str, Verdict]) -> None:
    """The one line that is left over did the work; of several, those that began alike."""
    unsettled = [line for line in lines if any(call.id not in verdicts for call in line.calls)]
    resumed = [line for line in unsettled if _kind(verdicts, line.root) is CallKind.COMPACTION]
    begun = [line for line in unsettled if line not in resumed]
    if len(begun) == 1:
        begun[0].give(Verdict(CallKind.MAIN, "the only conversation that does the work"), verdicts)
    elif len({line.head for line in begun}) == 1:
        for line in begun:
            line.give(Verdict(CallKind.MAIN, "every conversation has the same head"), verdicts)
    heads = {line.head[0] for line in begun if _kind(verdicts, line.calls[-1]) is CallKind.MAIN}
    for line in resumed:
        if any(digests(call)[0] in heads for call in line.calls[1:]):
            line.give(Verdict(CallKind.MAIN, "it goes on from a summary"), verdicts)


def _kind(verdicts: Mapping[str, Verdict], call: CallRow) -> CallKind:
    return verdicts.get(call.id, _UNKNOWN).kind
