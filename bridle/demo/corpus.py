"""Text for the demo's tokenizer: what the agent and its tools say, rendered as conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from harnesses.tasks import Task


def corpus(tasks: Iterable[Task], agent_source: str) -> Iterator[str]:
    """The agent's own source (its prompt, tool names and descriptions), then one text per task:
    the question, the markup of its tool calls, their results and an answer."""
    yield agent_source
    yield json.dumps(_TOOL_SHAPE)
    for task in tasks:
        calls = "".join(
            f"<tool_call>\n{json.dumps({'name': step['tool'], 'arguments': step['arguments']})}\n"
            f"</tool_call>\n<tool_response>\n{step['result']}\n</tool_response>\n"
            for step in task.payload["steps"]
        )
        yield f"user\n{task.prompt}\nassistant\n{calls}The answer is {task.payload['answer']}."


_TOOL_SHAPE = {
    "type": "function",
    "function": {
        "name": "name",
        "description": "description",
        "parameters": {
            "properties": {"a": {"type": "integer"}, "item": {"type": "string"}},
            "required": ["a", "b"],
            "type": "object",
        },
    },
}
