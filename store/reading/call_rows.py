"""Rows of calls and spans, decoded for readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, select

from bridle.store.call import CallRow
from bridle.store.declaration import Part
from bridle.store.reading.damage import Shapes
from bridle.store.reading.loading import SPANS as SPANS
from bridle.store.reading.loading import Said, json_as_text, messages_of, read_span
from bridle.store.records import OBSERVED, Conversation, LineageState, Message, Span
from bridle.store.schema.tables import calls, spans, tool_sets


@dataclass(frozen=True, slots=True)
class SpanRow:
    """A span as stored, with the columns that the tree itself does not need."""

    span: Span
    length: int
    choice: int | None
    finish_reason: str | None
    checksum: bytes


_ROW: Final = Part(CallRow)
_LINEAGE: Final = Part(LineageState)
_WIDTH: Final = len(_ROW.names)
_ID, _SESSION_ID = (_ROW.names.index(name) for name in ("id", "session_id"))
_COLUMNS: Final = {column.name: column for column in json_as_text(calls)}
CALLS: Final = select(*(_COLUMNS[name] for name in _ROW.names + _LINEAGE.names))
"""The query whose rows :func:`read_calls` reads."""

_LENGTH, _CHOICE, _FINISH, _CHECKSUM = (
    list(spans.c.keys()).index(name) for name in ("length", "choice", "finish_reason", "checksum")
)

_SHAPES: Final = Shapes(CALLS.selected_columns)
_SPAN_SHAPES: Final = Shapes(SPANS.selected_columns)

ToolSets = Mapping[tuple[str, bytes], tuple[Mapping[str, Any], ...]]
"""Definitions of tools by session and identifier of the set."""


def read_calls(connection: Connection, rows: Sequence[Row[Any]]) -> list[CallRow]:
    """Return the calls of rows of ``CALLS``, with their messages."""
    for row in rows:
        _SHAPES.check(row)
    said = messages_of(connection, [row[_ID] for row in rows])
    tools = _tool_sets(connection, {row[_SESSION_ID] for row in rows})
    return [_read_call(row, said[row[_ID]], tools) for row in rows]


def _tool_sets(connection: Connection, session_ids: set[str]) -> ToolSets:
    found: dict[tuple[str, bytes], tuple[Mapping[str, Any], ...]] = {}
    for session_id in session_ids:
        query = select(tool_sets.c.id, tool_sets.c.definitions)
        for row in connection.execute(query.where(tool_sets.c.session_id == session_id)):
            found[session_id, bytes(row.id)] = tuple(row.definitions)
    return found


def _read_call(row: Row[Any], said: Said, tools: ToolSets) -> CallRow:
    fields = _ROW.fields(row)
    return CallRow(
        **fields,
        conversation=_read_conversation(row, fields, said.asked, tools),
        replies=said.replies,
    )


def _read_conversation(
    row: Row[Any], fields: Mapping[str, Any], asked: tuple[Message, ...], tools: ToolSets
) -> Conversation | None:
    length, tools_id = fields["request_messages"], fields["tools_id"]
    if length is None:
        return None
    found = _LINEAGE.fields(row[_WIDTH:])
    lineage = LineageState(**found) if "digests" in found else None
    defined = () if tools_id is None else tools[fields["session_id"], bytes(tools_id)]
    return Conversation(asked, defined, length, fields["instructions"], lineage)


def read_span_row(row: Row[Any]) -> SpanRow:
    _SPAN_SHAPES.check(row)
    choice = row[_CHOICE]
    return SpanRow(
        read_span(row),
        row[_LENGTH],
        None if choice == OBSERVED else choice,
        row[_FINISH],
        row[_CHECKSUM],
    )
