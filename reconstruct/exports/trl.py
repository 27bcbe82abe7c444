"""TRL's conversational and prompt-completion datasets, with tool schemas.

``tools`` is the tools' JSON as text, which ``SFTTrainer`` reads and which no table of columns can
mix up between rows. Arguments are objects and reasoning is ``reasoning_content``, as chat templates
expect them.

TRL has no weight on a message, and trains either every assistant message or the completion. So the
conversational format holds the conversations in which every assistant message is trained. The
prompt-completion format holds a row for each trained reply, which consists of messages, or of two
texts where a bare prompt was completed. A file for TRL must hold one of these kinds, which
``--where call.dialect=completions`` selects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from bridle.reconstruct.conversation import ChatMessage
from bridle.reconstruct.exports.lines import ExportedConversation, Inexpressible
from bridle.reconstruct.exports.messages import reasoning, text, tool_calls
from bridle.store.reading.conversation import completes_prompt


def conversational_rows(exported: ExportedConversation) -> Iterator[dict[str, Any]]:
    """Yield ``{"messages": […], "tools": "…"}`` for ``assistant_only_loss=True``."""
    exported.require_messages()
    for entry in exported.messages:
        if entry.message.get("role") == "assistant" and not exported.is_trained(entry):
            raise Inexpressible("conversation_partly_trained")
    yield {
        "messages": [plain_message(entry.message) for entry in exported.messages],
        **tool_schemas(exported),
    }


def prompt_completion_rows(exported: ExportedConversation) -> Iterator[dict[str, Any]]:
    """Yield ``{"prompt": […], "completion": […], "tools": "…"}`` for each reply that is trained."""
    if completes_prompt(exported.last_call):
        yield {"prompt": _prompt(exported), "completion": text(exported.messages[-1].message)}
        return
    messages = [plain_message(entry.message) for entry in exported.messages]
    for index, entry in enumerate(exported.messages):
        if exported.is_trained(entry):
            prompt, completion = messages[:index], messages[index : index + 1]
            yield {"prompt": prompt, "completion": completion, **tool_schemas(exported)}


def _prompt(exported: ExportedConversation) -> str:
    prompt = orjson.loads(exported.session.request(exported.last_call))["prompt"]
    while isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str):
        raise Inexpressible("prompt_not_text")
    return prompt


def tool_schemas(exported: ExportedConversation) -> dict[str, str]:
    """Return the column of the tools, if there are any."""
    return {"tools": orjson.dumps(list(exported.tools)).decode()} if exported.tools else {}


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message as TRL and chat templates expect it."""
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
