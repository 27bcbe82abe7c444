"""OpenAI's chat fine-tuning JSONL: one conversation per line, with tools.

An assistant message that must not be learned carries ``"weight": 0``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reconstruct.exports.lines import Told, export_lines
from reconstruct.exports.selection import ExportReport, Selection
from store.queries import Reader


def export_chat(
    reader: Reader, path: str | Path, selection: Selection | None = None
) -> ExportReport:
    """Writes the selected sessions to ``path``, one at a time."""
    return export_lines(reader, path, chat_rows, selection)


def chat_rows(told: Told, _: Reader) -> Iterator[dict[str, Any]]:
    """One line."""
    messages = []
    for turn in told.turns:
        message = dict(turn.message)
        if message.get("role") == "assistant" and not told.is_trained(turn):
            message["weight"] = 0
        messages.append(message)
    line: dict[str, Any] = {"messages": messages}
    if told.tools:
        line["tools"] = list(told.tools)
    yield line
