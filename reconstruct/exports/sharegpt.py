"""ShareGPT with tools in the Hermes form: ``<tool_call>`` and ``<tool_response>`` in the text.

A ``gpt`` turn that must not be learned carries ``"weight": 0``, as Axolotl reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import orjson

from bridle.reconstruct.conversation import ChatMessage
from bridle.reconstruct.exports.lines import ExportedConversation, Inexpressible
from bridle.reconstruct.exports.messages import reasoning, text, tool_calls

_FROM: Final = {
    "system": "system",
    "developer": "system",
    "user": "human",
    "assistant": "gpt",
    "tool": "tool",
}


def sharegpt_rows(exported: ExportedConversation) -> Iterator[dict[str, Any]]:
    """Yield one line; consecutive tool results become one ``tool`` turn."""
    exported.require_messages()
    turns: list[dict[str, Any]] = []
    for entry in exported.messages:
        speaker = _FROM.get(entry.message["role"])
        if speaker is None:
            raise Inexpressible("role_unknown")
        turn: dict[str, Any] = {"from": speaker, "value": _value(speaker, entry.message)}
        if speaker == "tool" and turns and turns[-1]["from"] == "tool":
            turns[-1]["value"] += "\n" + turn["value"]
            continue
        if speaker == "gpt":
            turn["weight"] = int(exported.is_trained(entry))
        turns.append(turn)
    line: dict[str, Any] = {"id": exported.id, "conversations": turns}
    if exported.tools:
        line["tools"] = orjson.dumps(list(exported.tools)).decode()
    yield line


def _value(speaker: str, message: ChatMessage) -> str:
    content = text(message)
    if speaker == "tool":
        return f"<tool_response>\n{content}\n</tool_response>"
    parts = [content] if content else []
    for call in tool_calls(message):
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    thought = reasoning(message)
    opening = "" if thought is None else f"<think>\n{thought}\n</think>\n\n"
    return opening + "\n".join(parts)
