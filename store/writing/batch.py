"""The records of one transaction as rows: each table is written by one ``executemany``.

Records become rows before the transaction begins, because other processes may wait for it to end.
Preparing a record may read (a session's latest request after a restart) and changes the session's
state in the cache. A batch that is not written must therefore be taken back with
:meth:`Batch.undo`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from msgspec import structs
from sqlalchemy import Connection, Insert, Table, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from bridle.store.call import CallBegun, CallEnded
from bridle.store.encoding.bodies import (
    REQUEST,
    RESPONSE,
    Earlier,
    pack_request,
    pack_whole,
    sha256_after,
    sha256_of,
    texts_of,
)
from bridle.store.encoding.packing import dump_json
from bridle.store.errors import RecordRejected
from bridle.store.reading import loading as stored
from bridle.store.records import (
    OBSERVED,
    AttemptBegun,
    AttemptEnded,
    Conversation,
    Growth,
    Metric,
    PolicyRecord,
    RunRecord,
    SessionRecord,
    TaskRecord,
    new_id,
    span_place,
)
from bridle.store.reward import Reward
from bridle.store.schema.tables import (
    calls,
    metrics,
    policies,
    rewards,
    runs,
    sessions,
    tasks,
)
from bridle.store.trained import SessionFates
from bridle.store.tree import TokenTree
from bridle.store.writing import attempts, fates
from bridle.store.writing.cache import CachedSession, SessionCache, load_session
from bridle.store.writing.rows import (
    WRITER,
    begun_row,
    body_row,
    ended_row,
    message_rows,
    span_row,
    statements,
    storable,
)
from bridle.store.writing.sums import withdraw


@dataclass(frozen=True, slots=True)
class Patch:
    """New values for some columns of one row."""

    table: str
    id: str
    fields: Mapping[str, Any]
    once: str | None = None
    """A column. If it has a value already, nothing is changed."""


Record = (
    CallBegun
    | CallEnded
    | SessionRecord
    | Reward
    | RunRecord
    | TaskRecord
    | PolicyRecord
    | Metric
    | SessionFates
    | AttemptBegun
    | AttemptEnded
    | Patch
)

_OWN_TABLE: Final[Mapping[type, Table]] = {
    SessionRecord: sessions,
    Reward: rewards,
    RunRecord: runs,
    TaskRecord: tasks,
    PolicyRecord: policies,
    Metric: metrics,
}
"""The tables of flat records, whose columns are the record's fields."""
_REPLACED: Final = frozenset({tasks, policies, metrics})
_TABLES: Final = {"sessions": sessions, "runs": runs, "calls": calls}


class Batch:
    """A collection of records that are written in one transaction."""

    def __init__(
        self,
        reading: Callable[[], AbstractContextManager[Connection]],
        cache: SessionCache,
        lost: Collection[str],
    ) -> None:
        """Make an empty batch. ``reading`` opens a transaction that only reads."""
        self._reading = reading
        self._cache = cache
        self._lost = lost
        self._sessions: set[str] = set()
        self._new_calls: dict[str, list[Any]] = {}
        self._ended_calls: list[list[Any]] = []
        self._tool_sets: dict[tuple[str, bytes], tuple[Any, ...]] = {}
        self._messages: list[tuple[Any, ...]] = []
        self._bodies: list[tuple[Any, ...]] = []
        self._spans: list[tuple[Any, ...]] = []
        self._fates: list[SessionFates] = []
        self._attempts: list[AttemptBegun | AttemptEnded] = []
        self._patches: list[Patch] = []
        self._rows: dict[Table, list[dict[str, Any]]] = defaultdict(list)
        self.sealed: list[str] = []
        """The sessions that the batch seals."""
        self.changed: set[str] = set()
        """The sessions of which a call begins, ends or is changed."""
        self.resummed = False
        """True if any of the changed sessions had sums."""

    def add(self, record: Record) -> None:
        """Turn a record into rows. Errors of a malformed record are raised as they are."""
        match record:
            case CallBegun():
                self._begin(record)
            case CallEnded():
                self._end(record)
            case Patch():
                self._patches.append(record)
                if record.fields.get("sealed_at") is not None:
                    self.sealed.append(record.id)
            case SessionFates():
                self._fates.append(record)
            case AttemptBegun() | AttemptEnded():
                self._attempts.append(record)
            case _:
                self._rows[_OWN_TABLE[type(record)]].append(_columns(record))
                if isinstance(record, SessionRecord):
                    self._open(record.id)
                    if record.sealed_at is not None:
                        self.sealed.append(record.id)

    def write(self, connection: Connection, writer_id: str) -> None:
        """Write all rows, owners before the rows that they own."""
        self._write_rows(connection, runs)
        for attempt in self._attempts:
            self._write_attempt(connection, attempt, writer_id)
        self._write_rows(connection, tasks, sessions)
        for patch in self._patches:
            self._patch(connection, patch)
        if self._new_calls or self._ended_calls:
            self._write_calls(connection, writer_id)
        self._write_rows(connection, rewards, policies, metrics)
        if self._fates:
            fates.replace(connection, self._fates)

    def _write_attempt(
        self, connection: Connection, record: AttemptBegun | AttemptEnded, writer_id: str
    ) -> None:
        if isinstance(record, AttemptBegun):
            attempts.begin(connection, record, writer_id)
        elif attempts.end(connection, record, writer_id) != 1:
            raise RecordRejected(f"no row {record.run_id} in runs")

    def _write_calls(self, connection: Connection, writer_id: str) -> None:
        hot = statements(connection.dialect.name)
        if self._tool_sets:
            hot.add_tool_sets.run(connection, [row for _, row in sorted(self._tool_sets.items())])
        if self._new_calls:
            for row in self._new_calls.values():
                row[WRITER] = writer_id
            hot.begin_calls.run(connection, list(self._new_calls.values()))
        if self._ended_calls:
            ended = hot.end_calls.run(connection, self._ended_calls)
            if ended != len(self._ended_calls):
                raise RecordRejected("an ended call was never begun in this store")
        if self._messages:
            hot.add_messages.run(connection, self._messages)
        if self._bodies:
            hot.add_bodies.run(connection, self._bodies)
        if self._spans:
            hot.add_spans.run(connection, self._spans)
        self._withdraw_sums(connection, self.changed)

    def _withdraw_sums(self, connection: Connection, session_ids: Collection[str]) -> None:
        """Let readers count the calls of sessions whose calls have changed."""
        sums = statements(connection.dialect.name).withdraw_sums
        if sums.run(connection, [(each,) for each in sorted(session_ids)]):
            withdraw(connection, session_ids)
            self.resummed = True

    def settle(self) -> None:
        """Update the cache's sizes after the commit, so that it can make room."""
        for session_id in self._sessions:
            self._cache.settle(session_id)

    def undo(self) -> None:
        """Forget the sessions whose state is ahead of the database after a failure."""
        for session_id in self._sessions:
            self._cache.forget(session_id)

    def _begin(self, begun: CallBegun) -> None:
        self.changed.add(begun.session_id)
        state = self._state(begun.session_id)
        said, tools_id, texts = begun.conversation, None, b""
        if said is not None:
            tail = storable(said.tail)
            self._messages += message_rows(begun.id, OBSERVED, said.length - len(tail), tail)
            texts = texts_of(tail)
        state.open_calls[begun.id] = 0 if said is None else said.length
        body = begun.request_body
        base_id, base = state.request_base(begun.parent_call_id)
        before, alike = begun.repeats or (None, 0)
        known = alike if base is not None and before is base.data else 0
        packed = pack_request(body, base, texts, known)
        whole = packed is None
        if said is not None and said.tools:
            tools_id = self._tool_set(state, begun.session_id, said, exact=whole)
            texts = texts_of(tail, said.tools) if whole else texts
        if packed is None:
            base_id, packed = None, pack_whole(body, texts)
        contains = base is not None and packed.contains(base.data)
        digest, hashed = sha256_after(body, packed.prefix, None if whole else base)
        earlier = Earlier(body, packed.depth, hashed=hashed, hashed_bytes=packed.prefix)
        state.remember_request(begun.id, earlier, superseded=base_id if contains else None)
        self._bodies.append(body_row(begun.id, REQUEST, packed, base_id))
        self._new_calls[begun.id] = begun_row(begun, digest, tools_id)

    def _end(self, ended: CallEnded) -> None:
        self.changed.add(ended.session_id)
        state = self._state(ended.session_id)
        growth = self._grow(ended)
        for span in growth.spans:
            self._spans.append(span_row(span, ended))
        position = state.open_calls.pop(ended.id, None)
        if position is None:
            with self._reading() as connection:
                position = stored.request_messages(connection, ended.id)
        replies = storable(ended.replies)
        for choice, reply in enumerate(replies):
            self._messages += message_rows(ended.id, choice, position, (reply,))
        texts = texts_of(replies)
        if texts and (earlier := state.requests.get(ended.id)) is not None:
            state.requests[ended.id] = structs.replace(earlier, replies=texts)
        body, digest = ended.response_body, None
        if body:
            digest = sha256_of(body).hex()
            self._bodies.append(body_row(ended.id, RESPONSE, pack_whole(body, texts)))
        row = ended_row(ended, growth.prompt_span_id, digest)
        if ended.id in self._new_calls:
            self._new_calls[ended.id][-len(row) :] = row
        else:
            self._ended_calls.append([*row, ended.id])

    def _tool_set(
        self, state: CachedSession, session_id: str, said: Conversation, *, exact: bool
    ) -> bytes:
        """Return the identifier of the request's tools, and add them if the session lacks them.

        With ``exact``, it is the set of these very definitions; without, it may be a set that means
        the same.
        """
        meaning = None if said.lineage is None else said.lineage.digests.tools
        if not exact and meaning is not None and meaning in state.tools:
            return state.tools[meaning]
        definitions = dump_json(said.tools)
        tools_id = blake2b(definitions, digest_size=16).digest()
        self._tool_sets[session_id, tools_id] = (session_id, tools_id, definitions.decode())
        if meaning is not None:
            state.tools[meaning] = tools_id
        return tools_id

    def _grow(self, ended: CallEnded) -> Growth:
        """Return the call's place in its session's tree, as the record has it.

        If the record has none, or hangs on a call that is not in the database, the call's tokens
        are stored whole.
        """
        if ended.growth is not None and not self._orphaned(ended.growth):
            return ended.growth
        tree = TokenTree(ended.session_id)
        prompt, experts = ended.prompt_token_ids, ended.prompt_experts
        return tree.grow(ended.id, prompt, ended.choices, experts=experts)

    def _orphaned(self, growth: Growth) -> bool:
        if not self._lost:
            return False
        above = [growth.prompt_span_id, *(span.parent_id for span in growth.spans)]
        return any(name is not None and span_place(name)[0] in self._lost for name in above)

    def _state(self, session_id: str) -> CachedSession:
        def load() -> CachedSession:
            with self._reading() as connection:
                return load_session(connection, session_id)

        self._sessions.add(session_id)
        return self._cache.get(session_id, load)

    def _open(self, session_id: str) -> None:
        """Cache an empty state for a new session, so that nothing is looked for in the database."""
        self._sessions.add(session_id)
        self._cache.get(session_id, CachedSession)

    def _patch(self, connection: Connection, patch: Patch) -> None:
        table = _TABLES[patch.table]
        statement = update(table).where(table.c.id == patch.id).values(dict(patch.fields))
        if patch.once is not None:
            statement = statement.where(table.c[patch.once].is_(None))
        if connection.execute(statement).rowcount != 1 and patch.once is None:
            raise RecordRejected(f"no row {patch.id} in {patch.table}")
        if table is calls:
            of = select(calls.c.session_id).where(calls.c.id == patch.id)
            own = list(connection.execute(of).scalars())
            self._withdraw_sums(connection, own)
            self.changed.update(own)

    def _write_rows(self, connection: Connection, *tables: Table) -> None:
        """Add the rows of these tables.

        Those of :data:`_REPLACED` replace the rows of the same keys.
        """
        for table in tables:
            if (rows := self._rows.get(table)) is None:
                continue
            if table in _REPLACED:
                keys = [column.name for column in table.primary_key]
                connection.execute(_upsert(connection, table, keys), _last(rows, keys))
            else:
                connection.execute(insert(table), rows)


def _upsert(connection: Connection, table: Table, keys: Sequence[str]) -> Insert:
    postgres = connection.dialect.name == "postgresql"
    statement = postgresql.insert(table) if postgres else sqlite.insert(table)
    others = {c.name: c for c in statement.excluded if c.name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=others)


def _columns(record: Any) -> dict[str, Any]:
    """Return the columns of a flat record. A reward gets its id; NaN is stored as NULL."""
    row = {name: getattr(record, name) for name in record.__dataclass_fields__}
    if isinstance(record, Reward):
        row["id"] = new_id("reward")
    elif isinstance(record, Metric) and math.isnan(record.value):
        row["value"] = None
    return row


def _last(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the newest row of each key.

    PostgreSQL refuses to upsert one row twice in a statement.
    """
    return list({tuple(row[key] for key in keys): row for row in rows}.values())
