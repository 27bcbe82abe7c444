"""Agent Data Protocol 1.5: a trajectory of actions and observations per line.

A tool call and its result refer to each other by ``tool_call_id``. The protocol accepts no call
without a result, so the calls of the last reply, which nothing answers, have no id. ``reward`` of
an action is null: a session's rewards are in ``details``, with the indices of the actions that are
trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from bridle.reconstruct.conversation import ChatMessage
from bridle.reconstruct.exports.lines import ExportedConversation, Inexpressible
from bridle.reconstruct.exports.messages import reasoning, text, tool_calls

SCHEMA_VERSION: Final = "1.5.0"


def adp_rows(exported: ExportedConversation) -> Iterator[dict[str, Any]]:
    """Yield one trajectory."""
    exported.require_messages()
    answered = _answered(exported)
    content: list[dict[str, Any]] = []
    trained: list[int] = []
    for entry in exported.messages:
        message = entry.message
        if message["role"] == "assistant":
            actions = _actions(message, answered)
            if exported.is_trained(entry):
                trained += range(len(content), len(content) + len(actions))
            content += actions
        elif message["role"] == "tool":
            content.append(
                {
                    "class_": "text_observation",
                    "content": text(message),
                    "source": "environment",
                    "tool_call_id": message["tool_call_id"],
                }
            )
        else:
            source = "user" if message["role"] == "user" else "environment"
            observation = {"class_": "text_observation", "content": text(message), "source": source}
            content.append(observation)
    yield {
        "schema_version": SCHEMA_VERSION,
        "id": exported.id,
        "content": content,
        "details": {
            "session_id": exported.session.record.id,
            "task_id": exported.session.record.task_id,
            "harness": exported.session.record.harness,
            "rewards": dict(exported.session.rewards),
            "trained_actions": trained,
            "tools": list(exported.tools),
        },
    }


def _answered(exported: ExportedConversation) -> set[str]:
    """Return the ids of the tool calls that have a result.

    Raise :class:`Inexpressible` if the links between calls and results are broken.
    """
    called: list[str] = []
    results: list[str] = []
    for entry in exported.messages:
        called += [call.id for call in tool_calls(entry.message)]
        if entry.message["role"] == "tool":
            results.append(entry.message["tool_call_id"])
    if len(set(called)) != len(called) or len(set(results)) != len(results):
        raise Inexpressible("tool_call_id_twice")
    if not set(results) <= set(called):
        raise Inexpressible("tool_result_without_call")
    last = {call.id for call in tool_calls(exported.messages[-1].message)}
    if set(called) - set(results) - last:
        raise Inexpressible("tool_call_without_result")
    return set(results)


def _actions(message: ChatMessage, answered: set[str]) -> list[dict[str, Any]]:
    content, thought = text(message), reasoning(message)
    calls = tool_calls(message)
    actions: list[dict[str, Any]] = [
        {
            "class_": "api_action",
            "function": call.name,
            "kwargs": call.arguments,
            "description": content or None,
            **({"tool_call_id": call.id} if call.id in answered else {}),
        }
        for call in calls
    ] or [{"class_": "message_action", "content": content}]
    actions[0]["reasoning_content"] = thought
    for later in actions[1:]:
        later["description"] = None
    return actions
