"""A table of messages for spreadsheets: CSV with a row for each message of a conversation.

What is not known is empty, never 0; tool calls and rewards are JSON in one cell.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from bridle.reconstruct.exports.lines import ExportedConversation
from bridle.reconstruct.exports.messages import reasoning, text

COLUMNS: Final = (
    "session",
    "task",
    "harness",
    "outcome",
    "rewards",
    "conversation",
    "position",
    "role",
    "content",
    "reasoning",
    "tool_calls",
    "tool_call_id",
    "trained",
)


def message_rows(exported: ExportedConversation) -> Iterator[dict[str, Any]]:
    """One row for each message, by :data:`COLUMNS`."""
    exported.require_messages()
    record = exported.session.record
    for position, entry in enumerate(exported.messages):
        calls = entry.message.get("tool_calls")
        yield {
            "session": record.id,
            "task": record.task_id,
            "harness": record.harness,
            "outcome": record.outcome,
            "rewards": orjson.dumps(dict(exported.session.rewards)).decode(),
            "conversation": exported.id,
            "position": position,
            "role": entry.message["role"],
            "content": text(entry.message),
            "reasoning": reasoning(entry.message),
            "tool_calls": orjson.dumps(calls).decode() if calls else None,
            "tool_call_id": entry.message.get("tool_call_id"),
            "trained": exported.is_trained(entry),
        }


def csv_line(row: Mapping[str, Any]) -> bytes:
    """A row of :data:`COLUMNS` as RFC 4180 writes it."""
    line = io.StringIO()
    csv.writer(line).writerow([row[column] for column in COLUMNS])
    return line.getvalue().encode()


HEADING: Final = csv_line({column: column for column in COLUMNS})
