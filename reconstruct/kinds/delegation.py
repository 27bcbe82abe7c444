"""Sub-agents: conversations whose task is an argument of another conversation's tool call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from bridle.reconstruct.conversation import first_reply, new_messages, texts
from bridle.store.reading.queries import CallRow
from bridle.store.records import ToolCall

TASK_LENGTH: Final = 16
"""The least number of characters of a delegated task: an argument of a tool call that opens a new
conversation, as a user message of its own."""

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
    asked: dict[str, Delegation] = {}
    found: dict[str, Delegation] = {}
    for call, first in calls:
        if call.id == first and call.parent_call_id is None:
            for text in texts(new_messages(call), "user", "system"):
                delegation = asked.get(text.strip())
                if delegation is not None and delegation.first_call_id != first:
                    found.setdefault(first, delegation)
        for tool_call in first_reply(call).tool_calls:
            for text, role in _tasks(tool_call):
                asked[text] = Delegation(first, call.id, role)
    return found


def _tasks(tool_call: ToolCall) -> Iterator[tuple[str, str]]:
    """Yield the longer texts among a tool call's arguments, each with the name of the sub-agent."""
    try:
        arguments = json.loads(tool_call.arguments)
    except ValueError:
        return
    if isinstance(arguments, dict):
        role = next((arguments[key] for key in _ROLE_ARGUMENTS if key in arguments), None)
        for value in arguments.values():
            if isinstance(value, str) and len(value.strip()) >= TASK_LENGTH:
                yield value.strip(), str(role or tool_call.name)
