"""One transaction's worth of records as rows: each table is written by one ``executemany``.

Preparing a record may read (a session's tree after a restart) and changes the session's state in
the cache; a batch whose transaction fails must therefore be taken back with :meth:`Batch.undo`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Insert, Table, insert, update
from sqlalchemy.dialects import postgresql, sqlite

from store import stored
from store.bodies import Body, BodyRow, body_id, encode
from store.cache import SessionCache, SessionState
from store.errors import RecordRejected
from store.records import (
    CallBegun,
    CallEnded,
    Metric,
    PolicyRecord,
    Reward,
    RunRecord,
    ServedPolicy,
    SessionRecord,
    TaskRecord,
    new_id,
)
from store.rows import begun_row, body_row, conversation_value, ended_row, span_row
from store.schema import calls, metrics, policies, rewards, runs, served, sessions, tasks
from store.statements import statements
from store.tree import TokenTree


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
    | ServedPolicy
    | Metric
    | Patch
)

_TABLES: Final = {"sessions": sessions, "runs": runs, "calls": calls}


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
        self._new_spans: list[dict[str, Any]] = []
        self._new_bodies: dict[str, dict[str, Any]] = {}
        self._additions: dict[str, tuple[SessionState, bytes]] = {}
        """By call begun in this batch: what its request row will add, when it is a new one."""
        self._leaning: list[tuple[dict[str, Any], CallEnded]] = []
        """Calls whose conversation was packed against a request row of this batch."""
        self._patches: list[Patch] = []
        self._rows: dict[Table, list[dict[str, Any]]] = defaultdict(list)

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
                self._open(record.id)
            case Reward():
                self._rows[rewards].append(_columns(record) | {"id": new_id("reward")})
            case RunRecord():
                self._rows[runs].append(_columns(record))
            case TaskRecord():
                self._rows[tasks].append(_columns(record))
            case PolicyRecord():
                self._rows[policies].append(_columns(record))
            case ServedPolicy():
                self._rows[served].append(_columns(record))
            case Metric():
                value = None if math.isnan(record.value) else record.value
                self._rows[metrics].append(_columns(record) | {"value": value})

    def write(self) -> None:
        """Sends all rows, owners before what they own."""
        self._many(runs)
        self._renew(tasks, "id")
        self._many(sessions)
        for patch in self._patches:
            self._patch(patch)
        hot = statements(self._connection.dialect.name)
        added = [row for _, row in sorted(self._new_bodies.items())]
        if hot.add_bodies.run(self._connection, added) != len(added):
            self._stand_alone()
        hot.begin_calls.run(self._connection, list(self._new_calls.values()))
        hot.add_spans.run(self._connection, self._new_spans)
        if hot.end_calls.run(self._connection, self._ended_calls) != len(self._ended_calls):
            raise RecordRejected("an ended call was never begun in this store")
        self._many(rewards)
        for table in (policies, served, metrics):
            self._renew(table, *(column.name for column in table.primary_key))

    def settle(self) -> None:
        """After the commit: the cache may count what has grown, and make room."""
        for call_id, (state, addition) in self._additions.items():
            state.additions[call_id] = addition
        for session_id in self._sessions:
            self._cache.settle(session_id)

    def undo(self) -> None:
        """After a failure: forgets the sessions whose state is ahead of the database."""
        for session_id in self._sessions:
            self._cache.forget(session_id)

    def _begin(self, begun: CallBegun) -> None:
        state = self._state(begun.session_id)
        base_call, base = state.request_base(begun.parent_call_id)
        body, row = self._body(begun.request_body, base)
        if row is not None and (addition := row.addition):
            self._additions[begun.id] = (state, addition)
        contains = base is not None and (row is None or row.contains(base))
        state.remember_request(begun.id, body, superseded=base_call if contains else None)
        self._new_calls[begun.id] = begun_row(begun, self._writer_id, body.id)
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
            state.tree.dissolve()
            state.tree = stored.token_tree(self._connection, ended.session_id)
            if not state.tree.knows(parent):
                state.unknown_parents.add(parent)
        growth = state.tree.grow(ended.id, ended.prompt_token_ids, ended.choices, parent)
        for span in growth.spans:
            self._new_spans.append(span_row(span, ended))
        response = self._response(ended.response_body, state)
        _, addition = self._additions.pop(ended.id, (state, b""))
        leans = bool(addition)
        addition = addition or state.additions.pop(ended.id, b"")
        row = ended_row(ended, growth.prompt_span_id, response, addition)
        if ended.id in self._new_calls:
            self._new_calls[ended.id].update(row)
            row = self._new_calls[ended.id]
        else:
            row["_id"] = ended.id
            self._ended_calls.append(row)
        if leans:
            self._leaning.append((row, ended))
        self.ended.append(ended.id)

    def _state(self, session_id: str) -> SessionState:
        self._sessions.add(session_id)
        return self._cache.get(session_id, lambda: stored.state(self._connection, session_id))

    def _open(self, session_id: str) -> None:
        """Nothing of a new session is in the database: its state is not looked for there."""
        self._sessions.add(session_id)
        self._cache.get(session_id, lambda: SessionState(TokenTree(session_id)))

    def _stand_alone(self) -> None:
        """A body was in the database already, maybe as another row than the one made here: then no
        conversation may need what that row adds."""
        self._additions.clear()
        for row, ended in self._leaning:
            row["conversation"] = conversation_value(ended)

    def _body(self, data: bytes, base: Body | None) -> tuple[Body, BodyRow | None]:
        """The body, and its row when that is new."""
        identifier = body_id(data)
        if base is not None and base.id == identifier:
            return base, None
        known = self._new_bodies.get(identifier)
        if known is not None:
            return Body(identifier, data, known["depth"]), None
        row = encode(data, base, identifier)
        self._new_bodies[identifier] = body_row(row)
        return Body(identifier, data, row.depth), row

    def _response(self, data: bytes, state: SessionState) -> str | None:
        """Stores a reply against the session's latest whole one: replies share their wrapping."""
        if not data:
            return None
        identifier = body_id(data)
        if identifier not in self._new_bodies:
            if state.responses is None:
                row = encode(data, None, identifier)
            else:
                row = self._cache.wrappings.encode(state.responses, data, identifier)
            self._new_bodies[identifier] = body_row(row)
            if row.base_id is None:
                state.responses = Body(identifier, data, 0)
        return identifier

    def _patch(self, patch: Patch) -> None:
        table = _TABLES[patch.table]
        statement = update(table).where(table.c.id == patch.id).values(dict(patch.fields))
        if self._connection.execute(statement).rowcount != 1:
            raise RecordRejected(f"no row {patch.id} in {patch.table}")

    def _many(self, table: Table) -> None:
        if rows := self._rows[table]:
            self._connection.execute(insert(table), rows)

    def _renew(self, table: Table, *keys: str) -> None:
        """Adds rows, or replaces those of the same keys."""
        if rows := _last(self._rows[table], *keys):
            self._connection.execute(self._upsert(table, *keys), rows)

    def _upsert(self, table: Table, *keys: str) -> Insert:
        postgres = self._connection.dialect.name == "postgresql"
        statement = postgresql.insert(table) if postgres else sqlite.insert(table)
        others = {c.name: c for c in statement.excluded if c.name not in keys}
        return statement.on_conflict_do_update(index_elements=keys, set_=others)


def _columns(record: Any) -> dict[str, Any]:
    """A flat record's fields, which are its table's columns."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _last(rows: Sequence[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """The newest row of each key: PostgreSQL refuses to upsert one row twice in a statement."""
    return list({tuple(row[key] for key in keys): row for row in rows}.values())
