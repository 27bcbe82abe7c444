"""Calls and spans as they are read: every column of their rows, decoded as far as it is asked for.

Reading a session for its tokens hardly needs what its calls said, so messages and conversations are
decoded when they are first looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any, Final

import orjson
from sqlalchemy import Row, select

from store.packing import unpack_json
from store.records import ALSO_BROKE_ON, CONSTRAINED, BreakReason, CallKind, CallStatus, Note, Span
from store.schema import bodies, calls, spans
from store.stored import SPANS as SPANS
from store.stored import conversation, json_as_text, read_span


@dataclass(frozen=True, slots=True)
class CallRow:
    """A call with every column of its table; ``None`` where it is not (yet) known."""

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

    def told_apart(self, kind: CallKind, role: str | None) -> CallRow:
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

    __slots__ = ("_read", "_value")

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self._value: dict[str, Any] | None = None

    @property
    def value(self) -> dict[str, Any]:
        if self._value is None:
            self._value = self._read()
        return self._value

    def __getitem__(self, key: str) -> Any:
        return self.value[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


CALLS: Final = select(*json_as_text(calls), bodies.c.data.label("request_row")).outerjoin(
    bodies, bodies.c.id == calls.c.request_body_id
)
"""What :func:`read_call` reads."""

_NAMES: Final = tuple(field.name for field in fields(CallRow))
_AT: Final = {name: index for index, name in enumerate(_NAMES)}
_KIND, _ROLE = _AT["kind"], _AT["role"]
_KIND_SET = _AT["kind_set"]
_STATUS, _BREAK_REASON, _NOTES = _AT["status"], _AT["break_reason"], _AT["notes"]
_MESSAGE, _CONVERSATION = _AT["message"], _AT["conversation"]
_OBJECTS: Final = tuple(_AT[name] for name in ("headers", "sampling", "usage", "error"))
_values: Final = attrgetter(*_NAMES)

_LENGTH, _CHOICE, _FINISH, _CHECKSUM = (
    list(spans.c.keys()).index(name) for name in ("length", "choice", "finish_reason", "checksum")
)

_KINDS: Final = {kind.value: kind for kind in CallKind}
_STATUSES: Final = {status.value: status for status in CallStatus}


def read_call(row: Row[Any]) -> CallRow:
    """A row of ``CALLS``: the table's columns are the fields, in their order."""
    values: list[Any] = list(row)
    request_row = values.pop()
    values[_KIND] = _KINDS[values[_KIND]]
    values[_STATUS] = _STATUSES[values[_STATUS]]
    if values[_BREAK_REASON] is not None:
        values[_BREAK_REASON] = BreakReason(values[_BREAK_REASON])
    if values[_KIND_SET] is not None:
        values[_KIND_SET] = _KINDS[values[_KIND_SET]]
    for at in _OBJECTS:
        values[at] = orjson.loads(values[at])
    values[_MESSAGE] = Unread(partial(unpack_json, values[_MESSAGE]))
    values[_CONVERSATION] = Unread(partial(conversation, values[_CONVERSATION], request_row))
    notes = values[_NOTES]
    values[_NOTES] = () if notes == "[]" else tuple(Note(**note) for note in orjson.loads(notes))
    return CallRow(*values)


def read_span_row(row: Row[Any]) -> SpanRow:
    """A row of ``SPANS``."""
    return SpanRow(read_span(row), row[_LENGTH], row[_CHOICE], row[_FINISH], row[_CHECKSUM])
