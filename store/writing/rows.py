"""Rows of the tables of calls, made from records, and the statements that write them.

Rows are ready for the driver, JSON as text. A statement is compiled once and run by the driver's
own ``executemany``, because SQLAlchemy's way to a cursor costs more than SQLite's work on a row.
Errors are still SQLAlchemy's; the writer decides by them whether to try again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Dialect, Executable, bindparam, insert, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import psycopg

from bridle.store.encoding.bodies import Packed
from bridle.store.encoding.packing import dump_json, pack_ids, pack_logprobs
from bridle.store.records import (
    OBSERVED,
    CallBegun,
    CallEnded,
    CallKind,
    CallStatus,
    Message,
    Span,
    ToolCall,
    span_place,
)
from bridle.store.schema.database import driver_error
from bridle.store.schema.tables import bodies, call_messages, calls, spans, tool_sets
from bridle.store.writing.integrity import contradiction, has_ids, span_checksum
from bridle.store.writing.liveness import RENEW

_IDS_ABSENT: Final = "no_token_ids"
"""Name of the note on a call whose upstream sent no ids, so that there is nothing to check or
train."""

_NOT_YET: Final[dict[str, Any]] = {
    "kind": CallKind.UNKNOWN.value,
    "role": None,
    "status": CallStatus.OPEN.value,
    "reason": None,
    "break_reason": None,
    "model_served": None,
    "prompt_span_id": None,
    "prompt_tokens": None,
    "sampled_tokens": None,
    "version_start": None,
    "version_end": None,
    "finish_reason": None,
    "response_sha256": None,
    "sampling": None,
    "sampler": None,
    "usage": None,
    "error": None,
    "notes": None,
    "first_token_at": None,
    "ended_at": None,
    "policy": None,
}
"""The columns that a call's end fills in, with their values while the call runs."""

_BY_HAND: Final[dict[str, Any]] = {"kind_set": None, "role_set": None, "kind_by": None}
"""The columns of the kind that a person may decide later."""

_encode: Final = msgspec.msgpack.Encoder().encode
_encode_json: Final = msgspec.json.Encoder().encode


def begun_row(
    begun: CallBegun, writer_id: str, request_sha256: bytes, tools_id: bytes | None
) -> dict[str, Any]:
    """Return all columns of ``calls`` for a call that runs."""
    said = begun.conversation
    lineage = None if said is None else said.lineage
    return {
        "id": begun.id,
        "session_id": begun.session_id,
        "writer_id": writer_id,
        "dialect": begun.dialect,
        "stream": begun.stream,
        "parent_call_id": begun.parent_call_id,
        "lineage_rule": begun.lineage_rule,
        "base_call_id": None if lineage is None else lineage.base_call_id,
        "base_choice": None if lineage is None else lineage.base_choice,
        "retry_of": None if lineage is None else lineage.retry_of,
        "confidence": None if lineage is None else lineage.confidence,
        "differs": _json(lineage.differs) if lineage is not None and lineage.differs else None,
        "digests": None if lineage is None else _encode(lineage.digests),
        "request_messages": None if said is None else said.length,
        "instructions": None if said is None else said.instructions,
        "tools_id": tools_id,
        "model_requested": begun.model_requested,
        "request_sha256": request_sha256,
        "headers": _json(begun.headers),
        "started_at": begun.started_at,
        **_BY_HAND,
        **_NOT_YET,
    }


def ended_row(
    ended: CallEnded, prompt_span_id: str | None, response_sha256: bytes | None
) -> dict[str, Any]:
    """Return the columns of ``_NOT_YET``. A reply that contradicts itself is quarantined here,
    whichever caller wrote it, unless it has been checked before."""
    status, reason = ended.status, ended.reason
    notes = [{"name": note.name, "detail": note.detail} for note in ended.notes]
    if status in (CallStatus.COMPLETE, CallStatus.PARTIAL):
        if not ended.compared and (found := contradiction(ended)) is not None:
            status, reason = CallStatus.QUARANTINED, found
        elif (
            ended.prompt_token_ids is None
            and ended.kind is not CallKind.COUNT
            and not has_ids(ended)
            and not any(note["name"] == _IDS_ABSENT for note in notes)
        ):
            notes.append({"name": _IDS_ABSENT, "detail": ""})
    versions, sampled = [], 0
    for choice in ended.choices:
        sampled += len(choice.token_ids)
        for run in choice.versions:
            versions.append(run.version)
    return {
        "kind": ended.kind.value,
        "role": ended.role,
        "status": status.value,
        "reason": reason,
        "break_reason": None if ended.break_reason is None else ended.break_reason.value,
        "model_served": ended.model_served,
        "prompt_span_id": prompt_span_id,
        "prompt_tokens": None if ended.prompt_token_ids is None else len(ended.prompt_token_ids),
        "sampled_tokens": sampled,
        "version_start": min(versions, default=None),
        "version_end": max(versions, default=None),
        "finish_reason": ended.choices[0].finish_reason if ended.choices else None,
        "response_sha256": response_sha256,
        "sampling": _json(ended.sampling) if ended.sampling else None,
        "sampler": None if ended.sampler is None else _encode_json(ended.sampler).decode(),
        "usage": _json(ended.usage) if ended.usage else None,
        "error": _json(ended.error) if ended.error else None,
        "notes": _json(notes) if notes else None,
        "first_token_at": ended.first_token_at,
        "ended_at": ended.ended_at,
        "policy": ended.policy,
    }


def storable(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return ``messages`` without NUL characters in the fields that only text columns hold."""
    return tuple(map(_without_nul, messages)) if any(map(_has_nul, messages)) else messages


def _has_nul(message: Message) -> bool:
    texts = [message.reasoning, message.tool_call_id, message.name]
    for call in message.tool_calls:
        texts += (call.id, call.name, call.arguments)
    return any([text is not None and "\0" in text for text in texts])


def _without_nul(message: Message) -> Message:
    def shown(text: str | None) -> Any:
        return None if text is None else text.replace("\0", "\ufffd")

    return msgspec.structs.replace(
        message,
        reasoning=shown(message.reasoning),
        tool_call_id=shown(message.tool_call_id),
        name=shown(message.name),
        tool_calls=tuple(
            ToolCall(
                shown(call.id),
                shown(call.name),
                shown(call.arguments),
                None if call.engine_id is None else shown(call.engine_id),
            )
            for call in message.tool_calls
        ),
    )


def message_rows(
    call_id: str, choice: int, position: int, messages: Sequence[Message]
) -> list[tuple[Any, ...]]:
    """Return rows of ``call_messages``, from ``position`` on."""
    rows: list[tuple[Any, ...]] = []
    for at, message in enumerate(messages, position):
        content, other = message.content, None
        if content is not None and (not isinstance(content, str) or "\0" in content):
            content, other = None, _json(content)
        tool_calls = _encode_json(message.tool_calls).decode() if message.tool_calls else None
        place = (call_id, choice, at, message.role)
        says = (content, other, message.reasoning, tool_calls, message.tool_call_id, message.name)
        rows.append(place + says)
    return rows


def span_row(span: Span, ended: CallEnded) -> tuple[Any, ...]:
    """Return a row of ``spans``."""
    call_id, choice = span_place(span.id)
    parent_call = parent_choice = None
    if span.parent_id is not None:
        parent_call, parent_choice = span_place(span.parent_id)
    versions = [(run.start, run.version) for run in span.versions]
    return (
        call_id,
        choice,
        None if parent_call == call_id else parent_call,
        parent_choice,
        span.start,
        len(span.token_ids),
        None if choice == OBSERVED else ended.choices[choice].finish_reason,
        pack_ids(span.token_ids),
        None if span.logprobs is None else pack_logprobs(span.logprobs),
        _json(versions) if versions else "[]",
        span_checksum(span),
    )


def body_row(
    call_id: str, part: str, packed: Packed, base_call_id: str | None = None
) -> tuple[Any, ...]:
    """Return a row of ``bodies``."""
    place = (packed.prefix, packed.suffix, packed.depth)
    return (call_id, part, base_call_id, *place, packed.data)


def _json(value: object) -> str:
    return dump_json(value).decode()


@dataclass(frozen=True, slots=True)
class Statement:
    """The SQL text of a statement, and the order of its parameters."""

    sql: str
    names: tuple[str, ...]

    def run(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> int:
        """Execute the statement for all rows, whose values are in the order of ``names``. Return
        the number of affected rows.

        Raise SQLAlchemy's ``DBAPIError``.
        """
        try:
            cursor = connection.connection.cursor()
            try:
                cursor.executemany(self.sql, rows)
                return cursor.rowcount
            finally:
                cursor.close()
        except connection.dialect.loaded_dbapi.Error as error:
            raise driver_error(connection, self.sql, error) from error

    def run_named(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> int:
        """Execute the statement as :meth:`run` does, for rows by name."""
        return self.run(connection, list(map(itemgetter(*self.names), rows)))


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements that write calls, and the one that renews the writer's lease."""

    begin_calls: Statement
    end_calls: Statement
    add_tool_sets: Statement
    add_messages: Statement
    add_bodies: Statement
    add_spans: Statement
    renew: Statement


@cache
def statements(backend: str) -> Statements:
    """Return the statements for ``sqlite`` or ``postgresql``."""
    dialect: Dialect
    # Rows that are named by what is in them: another writer may have added the same.
    add_tool_sets: Executable
    if backend == "postgresql":
        dialect = psycopg.dialect(paramstyle="format")  # type: ignore[no-untyped-call]
        add_tool_sets = postgresql.insert(tool_sets).on_conflict_do_nothing()
    else:
        dialect = sqlite.dialect(paramstyle="qmark")
        add_tool_sets = sqlite.insert(tool_sets).on_conflict_do_nothing()
    end_calls = (
        update(calls)
        .where(calls.c.id == bindparam("_id"))
        .values({name: bindparam(name) for name in _NOT_YET})
    )
    return Statements(
        begin_calls=_compile(insert(calls), dialect),
        end_calls=_compile(end_calls, dialect),
        add_tool_sets=_compile(add_tool_sets, dialect),
        add_messages=_compile(insert(call_messages), dialect),
        add_bodies=_compile(insert(bodies), dialect),
        add_spans=_compile(insert(spans), dialect),
        renew=_compile(RENEW, dialect),
    )


def _compile(statement: Executable, dialect: Dialect) -> Statement:
    compiled: Any = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
    return Statement(str(compiled), tuple(compiled.positiontup))
