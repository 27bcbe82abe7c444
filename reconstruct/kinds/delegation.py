"""Sub-agents: conversations that another conversation waits for.

The task of one is an argument of a tool call, or stands as a whole in the conversation's beginning.
A program that is no tool call, such as an agent's code, is known by the time: the conversation
begins after a reply of another agent and ends before that agent goes on.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from bridle.reconstruct.conversation import digests, first_reply, new_messages, texts
from bridle.store.reading.queries import CallRow
from bridle.store.reading.summaries import SUMMARY_LENGTH, openings
from bridle.store.records import ToolCall

TASK_LENGTH: Final = 16
"""The least number of characters of a delegated task: an argument of a tool call that opens a new
conversation, as a user message of its own. Inside another text it has ``SUMMARY_LENGTH``."""
_GAPS_READ: Final = 64
"""Maximum number of calls, the latest, whose continuation is awaited when a conversation begins."""
_DEEPEST: Final = 3
"""Number of objects that may stand around a task in the arguments."""

_ROLE_ARGUMENTS: Final = ("subagent_type", "agent_type", "agent_name", "agent")
"""Arguments in which the harnesses' delegating tools name the sub-agent."""


class Delegation(NamedTuple):
    """A tool call that delegates a task."""

    first_call_id: str
    """The first call of the conversation in which the tool was called."""
    call_id: str
    role: str


def delegated(calls: Iterable[tuple[CallRow, str]]) -> dict[str, Delegation]:
    """Return the source of each delegated conversation's task, by the conversation's first call.

    ``calls`` pairs each call, in the order of their start, with the first call of its conversation.
    """
    tasks = _Tasks()
    found: dict[str, Delegation] = {}
    for call, first in calls:
        if call.id == first and call.parent_call_id is None:
            for text in texts(new_messages(call), "user", "system"):
                delegation = tasks.stated_in(text)
                if delegation is not None and delegation.first_call_id != first:
                    found.setdefault(first, delegation)
        for tool_call in first_reply(call).tool_calls:
            for text, role in _tasks(tool_call):
                tasks.add(text, Delegation(first, call.id, role))
    return found


class _Tasks:
    """The texts of tool calls so far, each of which may be a task."""

    def __init__(self) -> None:
        self._whole: dict[str, Delegation] = {}
        self._by_opening: dict[str, str] = {}

    def add(self, text: str, delegation: Delegation) -> None:
        self._whole[text] = delegation
        if len(text) >= SUMMARY_LENGTH:
            self._by_opening[text[:SUMMARY_LENGTH]] = text

    def stated_in(self, text: str) -> Delegation | None:
        """Return the delegation whose task is the text, or a long one that stands in it."""
        if (whole := self._whole.get(text.strip())) is not None or not self._by_opening:
            return whole
        stated = (self._by_opening.get(opening) for opening in openings(text))
        tasks = (task for task in stated if task is not None and task in text)
        return next((self._whole[task] for task in tasks), None)


def _tasks(tool_call: ToolCall) -> Iterator[tuple[str, str]]:
    """Yield the longer texts among a tool call's arguments, each with the name of the sub-agent."""
    try:
        arguments = json.loads(tool_call.arguments)
    except ValueError:
        return
    if isinstance(arguments, dict):
        yield from _texts_in(arguments, tool_call.name)


def _texts_in(arguments: dict[str, Any], role: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    role = str(next((arguments[key] for key in _ROLE_ARGUMENTS if key in arguments), None) or role)
    for value in arguments.values():
        for one in value if isinstance(value, list) else (value,):
            if isinstance(one, dict) and depth < _DEEPEST:
                yield from _texts_in(one, role, depth + 1)
            elif isinstance(one, str) and len(one.strip()) >= TASK_LENGTH:
                yield one.strip(), role


class Gap(NamedTuple):
    """The time in which the result of a call was awaited."""

    start: float
    end: float
    call: CallRow


def gaps(calls: Sequence[CallRow]) -> list[Gap]:
    """Return the time between each call and the first that continues it, in their order."""
    ended = {call.id: call for call in calls if call.ended_at is not None}
    found: dict[str, Gap] = {}
    for call in calls:
        before = ended.get(call.parent_call_id or "")
        if before is not None and before.id not in found and before.ended_at is not None:
            found[before.id] = Gap(before.ended_at, call.started_at, before)
    return sorted(found.values(), key=lambda gap: gap.start)


def awaited_by(line: Sequence[CallRow], gaps: Sequence[Gap]) -> CallRow | None:
    """Return the call of another agent that waited for the whole of a conversation.

    The other agent has other instructions or tools. ``line`` are the conversation's calls, and
    ``gaps`` those of its session.
    """
    first = line[0]
    end = max(call.ended_at or float("inf") for call in line)
    before = bisect_right(gaps, first.started_at, key=lambda gap: gap.start)
    for gap in reversed(gaps[max(0, before - _GAPS_READ) : before]):
        if gap.end >= end and digests(gap.call) != digests(first):
            return gap.call
    return None


def tool_name(call: CallRow) -> str | None:
    """Return the name of the tool that a call's reply calls, or ``None`` unless it is only one."""
    names = {tool_call.name for tool_call in first_reply(call).tool_calls}
    return names.pop() if len(names) == 1 else None
