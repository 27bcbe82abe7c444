"""Rows of calls and spans, decoded for readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final

import msgspec
import orjson
from sqlalchemy import Connection, Row, null, select

from bridle.store.reading.damage import Shapes
from bridle.store.reading.loading import SPANS as SPANS
from bridle.store.reading.loading import Said, json_as_text, messages_of, read_span
from bridle.store.records import (
    ALSO_BROKE_ON,
    CONSTRAINED,
    OBSERVED,
    BreakReason,
    CallKind,
    CallStatus,
    Conversation,
    LineageState,
    Message,
    Note,
    RequestDigests,
    Sampler,
    Span,
)
from bridle.store.schema.tables import calls, spans, tool_sets


@dataclass(frozen=True, slots=True)
class CallRow:
    """A call as recorded. Fields are ``None`` where the value is not (yet) known."""

    id: str
    session_id: str
    writer_id: str
    dialect: str
    kind: CallKind
    role: str | None
    status: CallStatus
    reason: str | None
    stream: bool
    parent_call_id: str | None
    lineage_rule: str | None
    break_reason: BreakReason | None
    model_requested: str
    model_served: str | None
    prompt_span_id: str | None
    """The span in whose path the first ``prompt_tokens`` tokens are the prompt."""
    prompt_tokens: int | None
    sampled_tokens: int | None
    """Number of sampled tokens of all choices."""
    version_start: int | None
    version_end: int | None
    finish_reason: str | None
    """The finish reason of the first choice."""
    request_sha256: str
    response_sha256: str | None
    """The SHA-256 (hex) of the response; ``None`` if nothing was sent to the client."""
    headers: Mapping[str, str]
    sampling: Mapping[str, Any]
    sampler: Sampler | None
    usage: Mapping[str, Any]
    conversation: Conversation | None
    """The messages of the request; ``None`` if they were not read."""
    replies: tuple[Message, ...]
    """The reply of each choice; empty if the call has no reply."""
    error: Mapping[str, Any]
    notes: tuple[Note, ...]
    started_at: float
    first_token_at: float | None
    ended_at: float | None
    kind_set: CallKind | None
    """The kind that a person decided; it takes precedence over everything recorded."""
    role_set: str | None
    kind_by: str | None
    """The person who decided the kind."""
    policy: str | None
    """The name of the policy that the request asked for; ``None`` for the default."""

    @property
    def break_reasons(self) -> tuple[str, ...]:
        """All reasons of the call's break, that of the first difference first."""
        if self.break_reason is None:
            return ()
        others = (note.detail for note in self.notes if note.name == ALSO_BROKE_ON)
        return (self.break_reason.value, *others)

    @property
    def constrained(self) -> bool:
        """Whether the request asked for a reply constrained by a grammar."""
        return any(note.name == CONSTRAINED for note in self.notes)

    def with_kind(self, kind: CallKind, role: str | None) -> CallRow:
        """Return this call with another kind and role. ``dataclasses.replace`` takes three times as
        long, and every call of every session is classified."""
        values = list(_values(self))
        values[_KIND], values[_ROLE] = kind, role
        return CallRow(*values)


@dataclass(frozen=True, slots=True)
class SpanRow:
    """A span as stored, with the columns that the tree itself does not need."""

    span: Span
    length: int
    choice: int | None
    finish_reason: str | None
    checksum: bytes


_NAMES: Final = tuple(field.name for field in fields(CallRow))
_AT: Final = {name: index for index, name in enumerate(_NAMES)}
_ID, _SESSION_ID = _AT["id"], _AT["session_id"]
_KIND, _ROLE = _AT["kind"], _AT["role"]
_KIND_SET = _AT["kind_set"]
_STATUS, _BREAK_REASON, _NOTES = _AT["status"], _AT["break_reason"], _AT["notes"]
_CONVERSATION, _REPLIES = _AT["conversation"], _AT["replies"]
_SAMPLER: Final = _AT["sampler"]
_OBJECTS: Final = [_AT[name] for name in ("headers", "sampling", "usage", "error")]
_values: Final = attrgetter(*_NAMES)

_COLUMNS: Final = {column.name: column for column in json_as_text(calls)}
_OF_CONVERSATION: Final = (
    *("request_messages", "instructions", "tools_id", "digests", "base_call_id", "base_choice"),
    *("differs", "confidence", "retry_of"),
)
CALLS: Final = select(
    *(_COLUMNS.get(name, null().label(name)) for name in _NAMES),
    *(_COLUMNS[name] for name in _OF_CONVERSATION),
)
"""The query whose rows :func:`read_calls` reads."""

_LENGTH, _CHOICE, _FINISH, _CHECKSUM = (
    list(spans.c.keys()).index(name) for name in ("length", "choice", "finish_reason", "checksum")
)

_KINDS: Final = {kind.value: kind for kind in CallKind}
_STATUSES: Final = {status.value: status for status in CallStatus}
_decode_sampler: Final = msgspec.json.Decoder(Sampler).decode
_decode_digests: Final = msgspec.msgpack.Decoder(RequestDigests).decode

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
    values: list[Any] = list(row[: len(_NAMES)])
    values[_KIND] = _KINDS[values[_KIND]]
    values[_STATUS] = _STATUSES[values[_STATUS]]
    if values[_BREAK_REASON] is not None:
        values[_BREAK_REASON] = BreakReason(values[_BREAK_REASON])
    if values[_KIND_SET] is not None:
        values[_KIND_SET] = _KINDS[values[_KIND_SET]]
    for at in _OBJECTS:
        values[at] = {} if values[at] is None else orjson.loads(values[at])
    if values[_SAMPLER] is not None:
        values[_SAMPLER] = _decode_sampler(values[_SAMPLER])
    values[_CONVERSATION] = _read_conversation(row, said, tools)
    values[_REPLIES] = said.replies
    notes = values[_NOTES]
    values[_NOTES] = () if notes is None else tuple(Note(**note) for note in orjson.loads(notes))
    return CallRow(*values)


def _read_conversation(row: Row[Any], said: Said, tools: ToolSets) -> Conversation | None:
    (length, instructions, tools_id, digests, base_call_id, base_choice, differs, confidence,
     retry_of) = row[len(_NAMES) :]  # fmt: skip
    if length is None:
        return None
    lineage = None
    if digests is not None:
        lineage = LineageState(
            _decode_digests(digests),
            base_call_id,
            base_choice,
            () if differs is None else tuple(orjson.loads(differs)),
            confidence,
            retry_of,
        )
    defined = () if tools_id is None else tools[row[_SESSION_ID], bytes(tools_id)]
    return Conversation(said.asked, defined, length, instructions, lineage)


def read_span_row(row: Row[Any]) -> SpanRow:
    """Return the span of a row of ``SPANS``."""
    _SPAN_SHAPES.check(row)
    choice = row[_CHOICE]
    return SpanRow(
        read_span(row),
        row[_LENGTH],
        None if choice == OBSERVED else choice,
        row[_FINISH],
        row[_CHECKSUM],
    )
