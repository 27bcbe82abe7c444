"""Calls and spans as they are read: every column of their rows, decoded as far as it is asked for.

Reading a session for its tokens hardly needs what its calls said, so messages and conversations are
read when they are first looked at; how a call's texts are stored is nobody else's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

import orjson
from sqlalchemy import Engine, Row, Text, cast, null, select

from bridle.store.encoding.text_reader import LateTexts, TextReader
from bridle.store.reading.loading import SPANS as SPANS
from bridle.store.reading.loading import json_as_text, read_span
from bridle.store.records import (
    ALSO_BROKE_ON,
    CONSTRAINED,
    BreakReason,
    CallKind,
    CallStatus,
    Note,
    Span,
)
from bridle.store.schema.tables import calls, spans, templates
from bridle.store.writing.rows import OBSERVED, expected_usage


@dataclass(frozen=True, slots=True)
class CallRow:
    """What is recorded of a call; ``None`` where it is not (yet) known."""

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
    """Span in whose path the prompt is the first ``prompt_tokens`` tokens."""
    prompt_tokens: int | None
    sampled_tokens: int | None
    """Over all choices."""
    version_start: int | None
    version_end: int | None
    finish_reason: str | None
    """Of the first choice."""
    request_body_id: str | None
    response_body_id: str | None
    headers: Mapping[str, str]
    sampling: Mapping[str, Any]
    usage: Mapping[str, Any]
    message: Mapping[str, Any]
    """A :class:`Unread`, like the conversation."""
    conversation: Mapping[str, Any]
    error: Mapping[str, Any]
    notes: tuple[Note, ...]
    started_at: float
    first_token_at: float | None
    ended_at: float | None
    kind_set: CallKind | None
    """What a person says it was for; before anything recorded or told."""
    role_set: str | None
    kind_by: str | None
    """Who said so."""

    @property
    def break_reasons(self) -> tuple[str, ...]:
        """Every reason of the call's break, that of the first difference first."""
        if self.break_reason is None:
            return ()
        others = (note.detail for note in self.notes if note.name == ALSO_BROKE_ON)
        return (self.break_reason.value, *others)

    @property
    def constrained(self) -> bool:
        """Whether a grammar was asked to shape the reply."""
        return any(note.name == CONSTRAINED for note in self.notes)

    def with_kind(self, kind: CallKind, role: str | None) -> CallRow:
        """This call with another kind and role; ``dataclasses.replace`` takes three times as long,
        and every call of every session is told apart."""
        values = list(_values(self))
        values[_KIND], values[_ROLE] = kind, role
        return CallRow(*values)


@dataclass(frozen=True, slots=True)
class SpanRow:
    """A span as stored, with what the tree itself does not need."""

    span: Span
    length: int
    choice: int | None
    finish_reason: str | None
    checksum: bytes


class Unread(Mapping[str, Any]):
    """A JSON object that is decoded when it is first looked at; equal to a dict like it.

    ``dict(…)`` makes one of it, for whoever insists.
    """

    __slots__ = ("_call_id", "_part", "_texts", "_value")

    def __init__(self, call_id: str, texts: LateTexts | None, part: str) -> None:
        """``texts`` is ``None`` for a call that has said nothing yet."""
        self._call_id = call_id
        self._texts = texts
        self._part = part
        self._value: dict[str, Any] | None = None

    @property
    def value(self) -> dict[str, Any]:
        if self._value is None:
            said = getattr(self._texts.of(self._call_id), self._part) if self._texts else b""
            self._value = orjson.loads(said) if said else {}
        return self._value

    def __getitem__(self, key: str) -> Any:
        return self.value[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


_NAMES: Final = tuple(field.name for field in fields(CallRow))
_AT: Final = {name: index for index, name in enumerate(_NAMES)}
_ID, _SESSION_ID = _AT["id"], _AT["session_id"]
_KIND, _ROLE = _AT["kind"], _AT["role"]
_KIND_SET = _AT["kind_set"]
_STATUS, _BREAK_REASON, _NOTES = _AT["status"], _AT["break_reason"], _AT["notes"]
_MESSAGE, _CONVERSATION = _AT["message"], _AT["conversation"]
_OBJECTS: Final = {name: _AT[name] for name in ("headers", "sampling", "usage", "error")}
_PROMPT_TOKENS, _SAMPLED_TOKENS = _AT["prompt_tokens"], _AT["sampled_tokens"]
_values: Final = attrgetter(*_NAMES)

_COLUMNS: Final = {column.name: column for column in json_as_text(calls)}
CALLS: Final = select(
    *(_COLUMNS.get(name, null().label(name)) for name in _NAMES),
    calls.c.template_id,
    calls.c.texts,
    cast(templates.c.fields, Text).label("fields"),
).outerjoin(
    templates,
    (templates.c.session_id == calls.c.session_id) & (templates.c.id == calls.c.template_id),
)
"""What :func:`read_calls` reads."""

_LENGTH, _CHOICE, _FINISH, _CHECKSUM = (
    list(spans.c.keys()).index(name) for name in ("length", "choice", "finish_reason", "checksum")
)

_KINDS: Final = {kind.value: kind for kind in CallKind}
_STATUSES: Final = {status.value: status for status in CallStatus}


def read_calls(rows: Sequence[Row[Any]], engine: Engine, reader: TextReader) -> list[CallRow]:
    """Rows of ``CALLS``; what they say is read over the engine when it is looked at."""
    late = LateTexts(engine, reader)
    return [_read_call(row, late) for row in rows]


def _read_call(row: Row[Any], late: LateTexts) -> CallRow:
    values: list[Any] = list(row)
    fields, texts, template_id = values.pop(), values.pop(), values.pop()
    values[_KIND] = _KINDS[values[_KIND]]
    values[_STATUS] = _STATUSES[values[_STATUS]]
    if values[_BREAK_REASON] is not None:
        values[_BREAK_REASON] = BreakReason(values[_BREAK_REASON])
    if values[_KIND_SET] is not None:
        values[_KIND_SET] = _KINDS[values[_KIND_SET]]
    for name, at in _OBJECTS.items():
        value = orjson.loads(values[at])
        values[at] = _of_template(fields, name, values) if value is None else value
    said = None
    if texts is not None:
        said = late
        late.packed[values[_ID]] = (values[_SESSION_ID], template_id, texts)
    values[_MESSAGE] = Unread(values[_ID], said, "message")
    values[_CONVERSATION] = Unread(values[_ID], said, "conversation")
    notes = values[_NOTES]
    values[_NOTES] = () if notes == "[]" else tuple(Note(**note) for note in orjson.loads(notes))
    return CallRow(*values)


def _of_template(fields: str, name: str, values: Sequence[Any]) -> Mapping[str, Any]:
    value: Mapping[str, Any] = _fields(fields)[name]
    if name == "usage":
        return expected_usage(value, values[_PROMPT_TOKENS], values[_SAMPLED_TOKENS])
    return value


@lru_cache(maxsize=256)
def _fields(text: str) -> dict[str, Any]:
    """Of a template; a session's calls all ask for the same."""
    value: dict[str, Any] = orjson.loads(text)
    return value


def read_span_row(row: Row[Any]) -> SpanRow:
    """A row of ``SPANS``."""
    choice = row[_CHOICE]
    return SpanRow(
        read_span(row),
        row[_LENGTH],
        None if choice == OBSERVED else choice,
        row[_FINISH],
        row[_CHECKSUM],
    )
