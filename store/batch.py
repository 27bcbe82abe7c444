"""One transaction's worth of records as rows: each table is written by one ``executemany``.

Preparing a record may read (a session's tree after a restart) and changes the session's state in
the cache; a batch whose transaction fails must therefore be taken back with :meth:`Batch.undo`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from sqlalchemy import Connection, Insert, Table, bindparam, insert, update
from sqlalchemy.dialects import postgresql, sqlite

from store import stored
from store.bodies import Body, BodyRow, body_id, encode
from store.cache import SessionCache, SessionState
from store.errors import RecordRejected
from store.integrity import contradiction, has_ids
from store.packing import pack_ids, pack_json, pack_logprobs
from store.records import (
    CallBegun,
    CallEnded,
    CallStatus,
    Metric,
    PolicyRecord,
    Reward,
    RunRecord,
    SessionRecord,
    Span,
    SpanKind,
    TaskRecord,
    new_id,
)
from store.schema import bodies, calls, metrics, policies, rewards, runs, sessions, spans, tasks
from store.stored import span_checksum
from store.tree import Growth


@dataclass(frozen=True, slots=True)
class Patch:
    """New values for some columns of one row."""

    table: str
    id: str
    fields: Mapping[str, Any]


Record = (
    CallBegun
    | CallEnded
    | SessionRecord
    | Reward
    | RunRecord
    | TaskRecord
    | PolicyRecord
    | Metric
    | Patch
)

_TABLES: Final = {"sessions": sessions, "runs": runs, "calls": calls}

_END_COLUMNS: Final = (
    "kind",
    "role",
    "status",
    "reason",
    "break_reason",
    "model_served",
    "prompt_span_id",
    "prompt_tokens",
    "sampled_tokens",
    "version_start",
    "version_end",
    "finish_reason",
    "response_body_id",
    "sampling",
    "usage",
    "message",
    "conversation",
    "error",
    "notes",
    "first_token_at",
    "ended_at",
)
_END_CALL: Final = (
    update(calls)
    .where(calls.c.id == bindparam("_id"))
    .values({name: bindparam(name) for name in _END_COLUMNS})
)
_NOTHING: Final = pack_json({})


class Batch:
    """Collects records, then writes them on one connection."""

    def __init__(
        self,
        connection: Connection,
        cache: SessionCache,
        writer_id: str,
        parents: Mapping[str, str | None],
    ) -> None:
        self._connection = connection
        self._cache = cache
        self._writer_id = writer_id
        self._parents = parents
        self.begun: dict[str, str | None] = {}
        """Calls begun in this batch, with their parent calls."""
        self.ended: list[str] = []
        self._sessions: set[str] = set()
        self._new_calls: dict[str, dict[str, Any]] = {}
        self._ended_calls: list[dict[str, Any]] = []
        self._new_bodies: dict[str, BodyRow] = {}
        self._patches: list[Patch] = []
        self._rows: dict[Table, list[dict[str, Any]]] = {
            table: [] for table in (runs, tasks, sessions, spans, rewards, policies, metrics)
        }

    def add(self, record: Record) -> None:
        """Turns a record into rows. Raises whatever a malformed record makes of itself."""
        match record:
            case CallBegun():
                self._begin(record)
            case CallEnded():
                self._end(record)
            case Patch():
                self._patches.append(record)
            case SessionRecord():
                self._rows[sessions].append(_columns(record))
            case Reward():
                self._rows[rewards].append(_columns(record) | {"id": new_id("reward")})
            case RunRecord():
                self._rows[runs].append(_columns(record))
            case TaskRecord():
                self._rows[tasks].append(_columns(record))
            case PolicyRecord():
                self._rows[policies].append(_columns(record))
            case Metric():
                value = None if math.isnan(record.value) else record.value
                self._rows[metrics].append(_columns(record) | {"value": value})

    def write(self) -> None:
        """Sends all rows, owners before what they own."""
        self._many(insert(runs), self._rows[runs])
        self._many(self._upsert(tasks, "id"), _last(self._rows[tasks], "id"))
        self._many(insert(sessions), self._rows[sessions])
        for patch in self._patches:
            self._patch(patch)
        new_bodies = [asdict(row) for _, row in sorted(self._new_bodies.items())]
        self._many(self._insert(bodies).on_conflict_do_nothing(), new_bodies)
        self._many(insert(calls), list(self._new_calls.values()))
        self._many(insert(spans), self._rows[spans])
        if self._ended_calls:
            found = self._connection.execute(_END_CALL, self._ended_calls).rowcount
            if found != len(self._ended_calls):
                raise RecordRejected("an ended call was never begun in this store")
        self._many(insert(rewards), self._rows[rewards])
        for table in (policies, metrics):
            keys = [column.name for column in table.primary_key]
            self._many(self._upsert(table, *keys), _last(self._rows[table], *keys))

    def settle(self) -> None:
        """After the commit: the cache may count what has grown, and make room."""
        for session_id in self._sessions:
            self._cache.settle(session_id)

    def undo(self) -> None:
        """After a failure: forgets the sessions whose state is ahead of the database."""
        for session_id in self._sessions:
            self._cache.forget(session_id)

    def _begin(self, begun: CallBegun) -> None:
        state = self._state(begun.session_id)
        base = state.request_base(begun.parent_call_id)
        body = self._body(begun.request_body, base)
        state.remember_request(begun.id, body)
        self._new_calls[begun.id] = {
            "id": begun.id,
            "session_id": begun.session_id,
            "writer_id": self._writer_id,
            "dialect": begun.dialect,
            "status": CallStatus.OPEN,
            "stream": begun.stream,
            "parent_call_id": begun.parent_call_id,
            "lineage_rule": begun.lineage_rule,
            "model_requested": begun.model_requested,
            "request_body_id": body.id,
            "headers": begun.headers,
            "started_at": begun.started_at,
            **_UNENDED,
        }
        self.begun[begun.id] = begun.parent_call_id

    def _end(self, ended: CallEnded) -> None:
        parent = self.begun.get(ended.id, self._parents.get(ended.id))
        state = self._state(ended.session_id)
        if (
            parent is not None
            and not state.tree.knows(parent)
            and parent not in state.unknown_parents
            and parent not in self.ended
        ):
            state.tree = stored.token_tree(self._connection, ended.session_id)
            if not state.tree.knows(parent):
                state.unknown_parents.add(parent)
        growth = state.tree.grow(ended.id, ended.prompt_token_ids, ended.choices, parent)
        for span in growth.spans:
            self._rows[spans].append(_span_row(span, ended))
        response = self._response(ended.response_body, state)
        row = _end_row(ended, growth, response)
        if ended.id in self._new_calls:
            self._new_calls[ended.id].update(row)
        else:
            self._ended_calls.append({"_id": ended.id, **row})
        self.ended.append(ended.id)

    def _state(self, session_id: str) -> SessionState:
        self._sessions.add(session_id)
        return self._cache.get(session_id, lambda: stored.state(self._connection, session_id))

    def _body(self, data: bytes, base: Body | None) -> Body:
        identifier = body_id(data)
        if base is not None and base.id == identifier:
            return base
        row = self._new_bodies.get(identifier)
        if row is None:
            row = self._new_bodies[identifier] = encode(data, base, identifier)
        return Body(identifier, data, row.depth)

    def _response(self, data: bytes, state: SessionState) -> str | None:
        """Stores a reply against the session's latest whole one: replies share their wrapping."""
        if not data:
            return None
        body = self._body(data, state.response)
        if body.depth == 0:
            state.response = body
        return body.id

    def _patch(self, patch: Patch) -> None:
        table = _TABLES[patch.table]
        statement = update(table).where(table.c.id == patch.id).values(dict(patch.fields))
        if self._connection.execute(statement).rowcount != 1:
            raise RecordRejected(f"no row {patch.id} in {patch.table}")

    def _many(self, statement: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            self._connection.execute(statement, rows)

    def _insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        if self._connection.dialect.name == "postgresql":
            return postgresql.insert(table)
        return sqlite.insert(table)

    def _upsert(self, table: Table, *keys: str) -> Insert:
        statement = self._insert(table)
        others = {c.name: c for c in statement.excluded if c.name not in keys}
        return statement.on_conflict_do_update(index_elements=keys, set_=others)


_UNENDED: Final[dict[str, Any]] = {
    **dict.fromkeys(_END_COLUMNS),
    "kind": "unknown",
    "status": CallStatus.OPEN,
    "sampling": {},
    "usage": {},
    "message": {},
    "conversation": _NOTHING,
    "error": {},
    "notes": [],
}


def _end_row(ended: CallEnded, growth: Growth, response_body_id: str | None) -> dict[str, Any]:
    status, reason = ended.status, ended.reason
    notes = [{"name": note.name, "detail": note.detail} for note in ended.notes]
    if status in (CallStatus.COMPLETE, CallStatus.PARTIAL):
        if (found := contradiction(ended)) is not None:
            status, reason = CallStatus.QUARANTINED, found
        elif not has_ids(ended):
            notes.append({"name": "ids_missing", "detail": "the upstream told no token ids"})
    prompt = ended.prompt_token_ids
    runs_of_versions = [run.version for choice in ended.choices for run in choice.versions]
    return {
        "kind": ended.kind,
        "role": ended.role,
        "status": status,
        "reason": reason,
        "break_reason": ended.break_reason,
        "model_served": ended.model_served,
        "prompt_span_id": growth.prompt_span_id,
        "prompt_tokens": None if prompt is None else len(prompt),
        "sampled_tokens": sum(len(choice.token_ids) for choice in ended.choices),
        "version_start": min(runs_of_versions, default=None),
        "version_end": max(runs_of_versions, default=None),
        "finish_reason": ended.choices[0].finish_reason if ended.choices else None,
        "response_body_id": response_body_id,
        "sampling": ended.sampling,
        "usage": ended.usage,
        "message": ended.message,
        "conversation": pack_json(ended.conversation) if ended.conversation else _NOTHING,
        "error": ended.error,
        "notes": notes,
        "first_token_at": ended.first_token_at,
        "ended_at": ended.ended_at,
    }


def _span_row(span: Span, ended: CallEnded) -> dict[str, Any]:
    sampled = span.kind is SpanKind.SAMPLED
    choice = int(span.id.rsplit(".s", 1)[1]) if sampled else None
    return {
        "id": span.id,
        "session_id": span.session_id,
        "call_id": span.call_id,
        "parent_id": span.parent_id,
        "start": span.start,
        "length": len(span.token_ids),
        "kind": span.kind,
        "choice": choice,
        "finish_reason": None if choice is None else ended.choices[choice].finish_reason,
        "token_ids": pack_ids(span.token_ids),
        "logprobs": None if span.logprobs is None else pack_logprobs(span.logprobs),
        "versions": [[run.start, run.version] for run in span.versions],
        "checksum": span_checksum(span),
    }


def _columns(record: Any) -> dict[str, Any]:
    """A flat record's fields, which are its table's columns."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _last(rows: Sequence[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """The newest row of each key: PostgreSQL refuses to upsert one row twice in a statement."""
    return list({tuple(row[key] for key in keys): row for row in rows}.values())
