"""OpenAI's chat fine-tuning JSONL: a conversation in each line.

An assistant message with ``"weight": 0`` is context, as in the export.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bridle.reconstruct.imports.turns import (
    ImportedSession,
    NotReadable,
    as_recorded,
    chain,
    json_lines,
    name_of,
)
from bridle.store.records import Message, ToolCall


def read_chat(path: Path) -> Iterator[ImportedSession]:
    """Yield a session for each line."""
    for line in json_lines(path):
        messages = line.get("messages")
        if not isinstance(messages, list):
            raise NotReadable(f"{path}: a line has no `messages`")
        try:
            turns = chain([(_message(one), _sampled(one)) for one in messages])
        except (KeyError, TypeError, AttributeError) as error:
            raise NotReadable(f"{path}: a message of a line is not OpenAI's: {error!r}") from error
        yield ImportedSession(name_of("chat", line), turns, tools=tuple(line.get("tools") or ()))


def _sampled(message: dict[str, Any]) -> bool:
    return bool(message["role"] == "assistant" and message.get("weight", 1) != 0)


def _message(message: dict[str, Any]) -> Message:
    calls = [
        ToolCall(call.get("id", ""), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    role = "system" if message["role"] == "developer" else message["role"]
    return as_recorded(
        role,
        message.get("content"),
        message.get("reasoning_content"),
        calls,
        tool_call_id=message.get("tool_call_id"),
        name=message.get("name"),
    )
