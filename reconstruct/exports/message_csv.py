"""A table of messages for spreadsheets: CSV with a row for each message of a conversation.

An unknown value is an empty cell, never 0; tool calls and rewards are JSON in one cell. Recorded
text is not trusted: a spreadsheet would compute a cell that begins like a formula, so such a text
gets an apostrophe in front (:func:`inert`, undone by :func:`recorded`).
"""

from __future__ import annotations

import csv
import io
import re
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
    """Yield one row for each message, with the columns of :data:`COLUMNS`."""
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
    """Return a row of :data:`COLUMNS` as a line of CSV (RFC 4180)."""
    line = io.StringIO()
    csv.writer(line).writerow([inert(row[column]) for column in COLUMNS])
    return line.getvalue().encode()


_FORMULA: Final = re.compile(r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""The beginning of a text that spreadsheets take for a formula (OWASP, CSV Injection), the
full-width forms of the signs included. Leading apostrophes are allowed before it."""


def inert(cell: Any) -> Any:
    """Return ``cell`` with an apostrophe in front if it is a text that begins like a formula."""
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


def recorded(cell: str) -> str:
    """Return the text that :func:`inert` wrote as ``cell``."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


HEADING: Final = csv_line({column: column for column in COLUMNS})
