"""OpenAI's chat fine-tuning JSONL: one conversation per line, with tools.

An assistant message that must not be learned carries ``"weight": 0``. Reasoning is
``reasoning_content``, as chat templates expect it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bridle.reconstruct.conversation import ChatMessage
from bridle.reconstruct.exports.lines import ExportedConversation, export_lines
from bridle.reconstruct.exports.messages import reasoning, text
from bridle.reconstruct.exports.selection import ExportReport, Selection
from bridle.store.reading.queries import Reader


def export_chat(
    reader: Reader, path: str | Path, selection: Selection | None = None
) -> ExportReport:
    """Write the selected sessions to ``path``, one at a time."""
    return export_lines(reader, path, chat_rows, selection)


def chat_rows(exported: ExportedConversation) -> Iterator[dict[str, Any]]:
    """Yield one line."""
    exported.require_messages()
    messages = []
    for entry in exported.messages:
        message = _message(entry.message)
        if message.get("role") == "assistant" and not exported.is_trained(entry):
            message["weight"] = 0
        messages.append(message)
    line: dict[str, Any] = {"messages": messages}
    if exported.tools:
        line["tools"] = list(exported.tools)
    yield line


def _message(message: ChatMessage) -> dict[str, Any]:
    """Return the recorded message with the reasoning renamed and the newlines around it removed."""
    plain = dict(message)
    plain.pop("reasoning", None)
    if (thought := reasoning(message)) is not None:
        plain["reasoning_content"] = thought
    if isinstance(message.get("content"), str):
        plain["content"] = text(message)
    return plain
