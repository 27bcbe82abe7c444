"""Rows of the tables of calls, made from records, and the statements that write them.

Rows are ready for the driver, JSON as text. A statement is compiled once and run by the driver's
own ``executemany``, because SQLAlchemy's way to a cursor costs more than SQLite's work on a row.
Errors are still SQLAlchemy's; the writer decides by them whether to try again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Dialect, Executable, bindparam, delete, insert, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import psycopg

from bridle.store.call import (
    BegunFacts,
    CallBegun,
    CallEnded,
    DerivedFacts,
    EndedFacts,
    WrittenFacts,
)
from bridle.store.declaration import Part
from bridle.store.encoding.bodies import Packed
from bridle.store.encoding.packing import (
    dump_json,
    pack_experts,
    pack_ids,
    pack_kept,
    pack_logprobs,
)
from bridle.store.records import (
    IDS_MISSING,
    OBSERVED,
    CallKind,
    CallStatus,
    LineageState,
    Message,
    Note,
    Span,
    ToolCall,
    span_place,
)
from bridle.store.schema.columns import storable_json
from bridle.store.schema.database import driver_error
from bridle.store.schema.derived import session_totals
from bridle.store.schema.tables import bodies, call_messages, calls, spans, tool_sets
from bridle.store.writing.integrity import contradiction, has_ids, span_checksum
from bridle.store.writing.liveness import RENEW

_BEGINNING: Final = Part(BegunFacts, WrittenFacts, LineageState)
_END: Final = Part(EndedFacts, DerivedFacts)
_OPEN: Final = _END.row(EndedFacts(), DerivedFacts())
"""The columns that a call's end fills in, with their values while the call runs."""
WRITER: Final = _BEGINNING.names.index("writer_id")
"""The place of the writer's id in a :func:`begun_row`. It may change until the row is written."""

_VERSIONS: Final = attrgetter("start", "version")
_encode_json: Final = msgspec.json.Encoder().encode


def begun_row(begun: CallBegun, request_sha256: str, tools_id: bytes | None) -> list[Any]:
    """Return a row of ``calls`` for a call that runs, without the columns that a person sets.

    The place :data:`WRITER` is to be filled.
    """
    said = begun.conversation
    lineage = None if said is None else said.lineage
    written = WrittenFacts(
        writer_id="",
        request_sha256=request_sha256,
        request_messages=None if said is None else said.length,
        instructions=None if said is None else said.instructions,
        tools_id=tools_id,
    )
    return _BEGINNING.row(begun, written, lineage) + _OPEN


def ended_row(
    ended: CallEnded, prompt_span_id: str | None, response_sha256: str | None
) -> list[Any]:
    """Return the last columns of a :func:`begun_row`, which a call's end fills in.

    A reply that contradicts itself is quarantined here, whichever caller wrote it, unless it has
    been checked before.
    """
    if ended.status in (CallStatus.COMPLETE, CallStatus.PARTIAL):
        if not ended.compared and (found := contradiction(ended)) is not None:
            ended = replace(ended, status=CallStatus.QUARANTINED, reason=found)
        elif (
            ended.prompt_token_ids is None
            and ended.kind is not CallKind.COUNT
            and not has_ids(ended)
            and not any([note.name == IDS_MISSING for note in ended.notes])
        ):
            ended = replace(ended, notes=(*ended.notes, Note(IDS_MISSING)))
    versions, sampled = [], 0
    for choice in ended.choices:
        sampled += len(choice.token_ids)
        for run in choice.versions:
            versions.append(run.version)
    derived = DerivedFacts(
        prompt_span_id=prompt_span_id,
        prompt_tokens=None if ended.prompt_token_ids is None else len(ended.prompt_token_ids),
        sampled_tokens=sampled,
        version_start=min(versions, default=None),
        version_end=max(versions, default=None),
        finish_reason=ended.choices[0].finish_reason if ended.choices else None,
        response_sha256=response_sha256,
    )
    return _END.row(ended, derived)


def storable(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return ``messages`` without NUL characters in the fields that only text columns hold."""
    return tuple(map(_without_nul, messages)) if any(map(_has_nul, messages)) else messages


def _has_nul(message: Message) -> bool:
    texts = [message.reasoning, message.tool_call_id, message.name]
    for call in message.tool_calls:
        texts += (call.id, call.name, call.arguments)
    return "\0" in "".join(filter(None, texts))


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
    call_id, choice = span_place(span.id)
    parent_call = parent_choice = None
    if span.parent_id is not None:
        parent_call, parent_choice = span_place(span.parent_id)
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
        _encode_json(list(map(_VERSIONS, span.versions))).decode(),
        None if span.kept is None else pack_kept(span.kept),
        None if span.routed_experts is None else pack_experts(span.routed_experts),
        span_checksum(span),
    )


def body_row(
    call_id: str, part: str, packed: Packed, base_call_id: str | None = None
) -> tuple[Any, ...]:
    place = (packed.prefix, packed.suffix, packed.depth)
    return (call_id, part, base_call_id, *place, packed.data)


def _json(value: object) -> str:
    return dump_json(value).decode()


@dataclass(frozen=True, slots=True)
class Statement:
    """The SQL text of a statement.

    Its parameters are the columns that it sets, in the order of the table, and then those of its
    condition.
    """

    sql: str
    jsonb: tuple[int, ...] = ()
    """The places of the parameters that are JSON text for ``jsonb``."""

    def run(self, connection: Connection, rows: Sequence[Sequence[Any]]) -> int:
        """Execute the statement for all rows. Return the number of affected rows.

        Raise SQLAlchemy's ``DBAPIError``.
        """
        if self.jsonb:
            rows = [self._storable(row) for row in rows]
        try:
            cursor = connection.connection.cursor()
            try:
                cursor.executemany(self.sql, rows)
                return cursor.rowcount
            finally:
                cursor.close()
        except connection.dialect.loaded_dbapi.Error as error:
            raise driver_error(connection, self.sql, error) from error

    def _storable(self, row: Sequence[Any]) -> list[Any]:
        values = list(row)
        for place in self.jsonb:
            if values[place] is not None:
                values[place] = storable_json(values[place])
        return values


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements that write calls, withdraw their sessions' sums, and renew the lease."""

    begin_calls: Statement
    end_calls: Statement
    add_tool_sets: Statement
    add_messages: Statement
    add_bodies: Statement
    add_spans: Statement
    withdraw_sums: Statement
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
    end_calls = update(calls).where(calls.c.id == bindparam("_id")).values(_set(_END.names))
    withdraw = delete(session_totals).where(session_totals.c.session_id == bindparam("session"))
    return Statements(
        begin_calls=_compile(insert(calls).values(_set(_BEGINNING.names + _END.names)), dialect),
        end_calls=_compile(end_calls, dialect),
        add_tool_sets=_compile(add_tool_sets, dialect),
        add_messages=_compile(insert(call_messages), dialect),
        add_bodies=_compile(insert(bodies), dialect),
        add_spans=_compile(insert(spans), dialect),
        withdraw_sums=_compile(withdraw, dialect),
        renew=_compile(RENEW, dialect),
    )


def _set(names: Sequence[str]) -> dict[str, Any]:
    return {name: bindparam(name) for name in names}


def _compile(statement: Executable, dialect: Dialect) -> Statement:
    compiled = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
    types = [compiled.binds[name].type for name in compiled.positiontup]
    own = [isinstance(kind.dialect_impl(dialect), postgresql.JSONB) for kind in types]
    return Statement(str(compiled), tuple(place for place, jsonb in enumerate(own) if jsonb))
