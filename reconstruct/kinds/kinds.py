"""The kind of each recorded call, from the record alone.

A session's calls form *lines*: a call and every call that continues it, up to where lineage saw a
conversation begin. The line that does the work is ``main``. Any other line needs evidence for its
kind. Without evidence it is ``unknown``, which is trained, since nothing shows that the policy did
not act there. A recorded kind is kept. A kind that a person set (``bridle kind``) overrides
everything else, also as evidence for other calls.

Each verdict carries its evidence, which ``bridle show`` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bridle.reconstruct.conversation import digests, first_reply, tools
from bridle.reconstruct.kinds.compaction import compactions
from bridle.reconstruct.kinds.delegation import awaited_by, delegated, gaps, tool_name
from bridle.reconstruct.repeats import Repetition, repetitions
from bridle.store.reading.conversation import lineage_of
from bridle.store.reading.queries import CallRow
from bridle.store.records import BreakReason, CallKind, CallStatus

_CODEX_COMPACTIONS: Final = ('"request_kind":"compaction"', '"request_kind":"compact"')
"""Codex's words for it in its ``x-codex-turn-metadata``."""

_ANSWERED: Final = frozenset({CallStatus.COMPLETE, CallStatus.QUARANTINED})
"""The statuses of calls whose client got the whole reply."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A call's kind, and the reason for it."""

    kind: CallKind
    evidence: str
    """Stable words; empty when the kind is ``unknown``."""
    role: str | None = None


def with_kinds(
    calls: Sequence[CallRow], verdicts: Mapping[str, Verdict] | None = None
) -> list[CallRow]:
    """Return the calls of one session with the kinds of :func:`classify`, in the same order."""
    verdicts = classify(calls) if verdicts is None else verdicts
    return [_with_kind(call, verdicts[call.id]) for call in calls]


def _with_kind(call: CallRow, verdict: Verdict) -> CallRow:
    if call.kind_set is not None:
        return call.with_kind(verdict.kind, verdict.role)
    if call.kind is verdict.kind:
        return call
    return call.with_kind(verdict.kind, call.role or verdict.role)


def classify(
    calls: Sequence[CallRow], repeated: Mapping[str, Repetition] | None = None
) -> dict[str, Verdict]:
    """Return the verdict on every call of one session, by call id; earlier rules win.

    ``repeated`` are the calls' repetitions, which are found if they are not given.
    """
    repeated = repetitions(calls) if repeated is None else repeated
    lines = _lines(calls)
    verdicts = {call.id: stated for call in calls if (stated := _stated_kind(call)) is not None}
    tasks = delegated(_by_line(calls, lines)) if len(lines) > 1 else {}
    for call_id in compactions(calls, tasks):
        verdicts.setdefault(
            call_id, Verdict(CallKind.COMPACTION, "a shortened conversation begins with its reply")
        )
    for call_id, evidence in _replaced(calls, repeated).items():
        verdicts.setdefault(call_id, Verdict(CallKind.RETRY, evidence))
    for line in lines:
        if task := tasks.get(line.first.id):
            evidence = f"its task is an argument of a tool call of {task.call_id}"
            line.give(Verdict(CallKind.SUBAGENT, evidence, task.role), verdicts)
    for line in _side_lines(lines):
        evidence = "one call without tools, under instructions of its own"
        line.give(Verdict(CallKind.SIDE, evidence), verdicts)
    waits = gaps(calls) if len(lines) > 1 else []
    for line in lines:
        if line.first.parent_call_id is None and (by := awaited_by(line.calls, waits)):
            evidence = f"it ran while the result of {by.id} was awaited"
            line.give(Verdict(CallKind.SUBAGENT, evidence, tool_name(by)), verdicts)
    for call in _digressions(calls):
        verdicts.setdefault(
            call.id, Verdict(CallKind.SIDE, "asked with other tools or instructions, then left")
        )
    _settle(lines, verdicts)
    return {call.id: verdicts.get(call.id, _UNKNOWN) for call in calls}


_UNKNOWN: Final = Verdict(CallKind.UNKNOWN, "")


class _Line:
    """A line: the call that began a conversation, and every call that continues it."""

    def __init__(self, first: CallRow) -> None:
        self.calls = [first]

    @property
    def first(self) -> CallRow:
        return self.calls[0]

    @property
    def instructions(self) -> bytes:
        """Digest of the instructions with which the line began."""
        return digests(self.first)[0]

    @property
    def uses_tools(self) -> bool:
        return bool(tools(self.first))

    def give(self, verdict: Verdict, verdicts: dict[str, Verdict]) -> None:
        for call in self.calls:
            verdicts.setdefault(call.id, verdict)


def _lines(calls: Sequence[CallRow]) -> list[_Line]:
    """Return the lines in the order in which they began."""
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


def _by_line(calls: Sequence[CallRow], lines: Sequence[_Line]) -> list[tuple[CallRow, str]]:
    """Return the calls in the order of their start, each with the first call of its line."""
    first_of = {call.id: line.first.id for line in lines for call in line.calls}
    return [(call, first_of[call.id]) for call in calls]


def _stated_kind(call: CallRow) -> Verdict | None:
    """Return the kind that was set or stated for a call.

    A person set it, it was recorded, or the harness stated it in its headers.
    """
    if call.kind_set is not None:
        return Verdict(call.kind_set, f"set by {call.kind_by}", call.role_set)
    if call.kind is not CallKind.UNKNOWN:
        return Verdict(call.kind, "recorded", call.role)
    if agent := call.headers.get("x-claude-code-agent-id"):
        return Verdict(CallKind.SUBAGENT, "x-claude-code-agent-id", agent)
    lineage = lineage_of(call)
    if lineage is not None and lineage.digests.agent is not None:
        return Verdict(CallKind.SUBAGENT, "named by the harness", lineage.digests.agent)
    if parent := call.headers.get("x-parent-session-id"):
        own = call.headers.get("x-session-id")
        if own is not None and own != parent:
            return Verdict(CallKind.SUBAGENT, "x-parent-session-id", own)
    metadata = call.headers.get("x-codex-turn-metadata", "").replace(" ", "")
    if any(words in metadata for words in _CODEX_COMPACTIONS):
        return Verdict(CallKind.COMPACTION, "x-codex-turn-metadata")
    return None


def _replaced(calls: Sequence[CallRow], repeated: Mapping[str, Repetition]) -> dict[str, str]:
    """Return the calls in whose place another one that repeats them stands, with the evidence.

    They did not complete, or the conversation goes on from the other reply and not from theirs.
    """
    asked_by = {one.asked.id: later for later, one in repeated.items() if one.asked}
    if not asked_by:
        return {}
    continued = {call.parent_call_id for call in calls}
    found: dict[str, str] = {}
    for call in reversed(calls):
        later = asked_by.get(call.id)
        if later is None:
            continue
        if call.status is not CallStatus.COMPLETE:
            found[call.id] = "it did not complete and was asked again"
        elif call.id not in continued and (later in continued or later in found):
            found[call.id] = "its reply was left, and the conversation goes on from another"
    return found


def _side_lines(lines: Sequence[_Line]) -> list[_Line]:
    """Return the lines of one call without tools that have instructions of their own.

    Their instructions differ from those of every line with tools. There must be a line with more
    than one call.
    """
    if not any(len(line.calls) > 1 for line in lines) or len(lines) == 1:
        return []
    worked = {line.instructions for line in lines if line.uses_tools}
    return [
        line
        for line in lines
        if len(line.calls) == 1
        and line.first.parent_call_id is None
        and not line.uses_tools
        and worked
        and line.instructions not in worked
    ]


def _digressions(calls: Sequence[CallRow]) -> list[CallRow]:
    """Return the calls that leave a conversation while it goes on without them.

    They leave it with other tools or instructions. An interrupted turn does not count as going on,
    because such a call may resume it (:func:`_goes_on_beside`).
    """
    children: dict[str, list[CallRow]] = {}
    latest = {call.id: call.started_at for call in calls}
    """The start of the latest call that continues a call, or its own."""
    for call in reversed(calls):
        parent = call.parent_call_id
        if parent is not None and parent in latest:
            children.setdefault(parent, []).append(call)
            latest[parent] = max(latest[parent], latest[call.id])
    changed = (BreakReason.SYSTEM_CHANGED, BreakReason.TOOLS_CHANGED)
    return [
        call
        for siblings in children.values()
        for call in siblings
        if call.break_reason in changed
        and call.id not in children
        and any(
            other.break_reason not in changed
            and _goes_on_beside(call, other, latest[other.id], other.id in children)
            for other in siblings
        )
    ]


def _goes_on_beside(call: CallRow, other: CallRow, latest: float, continued: bool) -> bool:
    """Return whether the conversation of ``other`` goes on without ``call``.

    ``latest`` is the start of the latest call of its line, and ``continued`` is whether another
    call continues it. A turn was interrupted if its reply was cut, or if nothing answers its tool
    calls. Then it goes on only if something of its line is later than the beginning of ``call``.
    """
    if latest > call.started_at:
        return continued or other.status in _ANSWERED
    if other.status not in _ANSWERED:
        return False
    at_once = other.ended_at is None or other.ended_at > call.started_at
    return continued or at_once or not first_reply(other).tool_calls


def _settle(lines: Sequence[_Line], verdicts: dict[str, Verdict]) -> None:
    """Give ``main`` to lines without a verdict.

    It goes to the only one that does not begin with a compaction, or to all such lines if they
    began alike. A line that begins with a compaction gets it if the work continues from its
    summary.
    """
    unsettled = [line for line in lines if any(call.id not in verdicts for call in line.calls)]
    resumed = [line for line in unsettled if _kind(verdicts, line.first) is CallKind.COMPACTION]
    begun = [line for line in unsettled if _kind(verdicts, line.first) is not CallKind.COMPACTION]
    if len(begun) == 1:
        begun[0].give(Verdict(CallKind.MAIN, "the only conversation that does the work"), verdicts)
    elif len({digests(line.first) for line in begun}) == 1:
        for line in begun:
            line.give(Verdict(CallKind.MAIN, "every conversation has the same head"), verdicts)
    if not resumed:
        return
    worked = {
        line.instructions for line in begun if _kind(verdicts, line.calls[-1]) is CallKind.MAIN
    }
    for line in resumed:
        if any(digests(call)[0] in worked for call in line.calls[1:]):
            line.give(Verdict(CallKind.MAIN, "the work continues from a summary"), verdicts)


def _kind(verdicts: Mapping[str, Verdict], call: CallRow) -> CallKind:
    return verdicts.get(call.id, _UNKNOWN).kind
