"""TRL's conversational and prompt-completion datasets, with tool schemas.

``tools`` is the tools' JSON as text, which ``SFTTrainer`` reads and which no table of columns can
mix up between rows. Arguments are objects and reasoning is ``reasoning_content``, as chat templates
expect them.

TRL has no weight on a message, and trains either every assistant message or the completion. So the
conversational format holds the conversations in which every assistant message is trained; the
prompt-completion format holds a row for each trained reply: of messages, or of two texts where a
bare prompt was completed. TRL takes one kind in a file: ``--where call.dialect=completions``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from bridle.reconstruct.conversation import completes_prompt
from bridle.reconstruct.exports.lines import Inexpressible, Told
from bridle.reconstruct.exports.messages import Message, reasoning, text, tool_calls
from bridle.store.reading.queries import Reader


def conversational_rows(told: Told, _: Reader) -> Iterator[dict[str, Any]]:
    """``{"messages": […], "tools": "…"}``: for ``assistant_only_loss=True``."""
    told.require_messages()
    for turn in told.turns:
        if turn.message.get("role") == "assistant" and not told.is_trained(turn):
            raise Inexpressible("conversation_partly_trained")
    yield {"messages": [_message(turn.message) for turn in told.turns], **_tools(told)}


def prompt_completion_rows(told: Told, reader: Reader) -> Iterator[dict[str, Any]]:
    """``{"prompt": […], "completion": […], "tools": "…"}`` for each reply that is trained."""
    if completes_prompt(told.calls[told.leaf.call_id]):
        yield {"prompt": _prompt(told, reader), "completion": text(told.turns[-1].message)}
        return
    messages = [_message(turn.message) for turn in told.turns]
    for index, turn in enumerate(told.turns):
        if told.is_trained(turn):
            prompt, completion = messages[:index], messages[index : index + 1]
            yield {"prompt": prompt, "completion": completion, **_tools(told)}


def _prompt(told: Told, reader: Reader) -> str:
    prompt = orjson.loads(reader.request_body(told.leaf.call_id))["prompt"]
    while isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str):
        raise Inexpressible("prompt_not_text")
    return prompt


def _tools(told: Told) -> dict[str, str]:
    return {"tools": orjson.dumps(list(told.tools)).decode()} if told.tools else {}


def _message(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message["role"], "content": text(message)}
    if (thought := reasoning(message)) is not None:
        plain["reasoning_content"] = thought
    if calls := tool_calls(message):
        plain["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    if "tool_call_id" in message:
        plain["tool_call_id"] = message["tool_call_id"]
    return plain
