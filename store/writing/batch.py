"""One transaction's worth of records as rows: each table is written by one ``executemany``.

Preparing a record may read (a session's tree after a restart) and changes the session's state in
the cache; a batch whose transaction fails must therefore be taken back with :meth:`Batch.undo`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Insert, Table, insert, update
from sqlalchemy.dialects import postgresql, sqlite

from bridle.store.encoding.bodies import Body, Splice, body_id, splice, whole
from bridle.store.encoding.packing import checksum, dump_json
from bridle.store.encoding.text_reader import TextReader
from bridle.store.encoding.texts import (
    CallTokens,
    Context,
    Reply,
    Texts,
    lay_out,
    pack_alone,
    pack_texts,
)
from bridle.store.encoding.vocabulary import Vocabulary
from bridle.store.errors import RecordRejected
from bridle.store.reading import loading as stored
from bridle.store.records import (
    CallBegun,
    CallEnded,
    Growth,
    Metric,
    PolicyRecord,
    Reward,
    RunRecord,
    ServedPolicy,
    SessionRecord,
    Span,
    SpanKind,
    TaskRecord,
    TokenIds,
    new_id,
)
from bridle.store.schema.tables import (
    calls,
    metrics,
    policies,
    rewards,
    runs,
    served,
    sessions,
    tasks,
)
from bridle.store.tree import place
from bridle.store.writing.cache import OpenCall, SessionCache, SessionState, Template
from bridle.store.writing.rows import (
    begun_row,
    body_row,
    ended_row,
    leaning_fields,
    running_row,
    span_row,
    template_row,
)
from bridle.store.writing.statements import statements


@dataclass(frozen=True, slots=True)
class Patch:
    """New values for some columns of one row."""

    table: str
    id: str
    fields: Mapping[str, Any]
    once: str | None = None
    """A column; when it has a value already, nothing is changed."""


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

_TEMPLATE_REACH: Final = 1 << 14
"""Longer texts are no templates: every later call of the session would have to read them."""


class Batch:
    """Collects records, then writes them on one connection."""

    def __init__(
        self,
        connection: Connection,
        cache: SessionCache,
        writer_id: str,
        parents: Mapping[str, str | None],
        lost: Collection[str],
        texts: TextReader,
        vocabulary: Vocabulary | None,
    ) -> None:
        self._connection = connection
        self._cache = cache
        self._texts = texts
        self._vocabulary = vocabulary
        self._writer_id = writer_id
        self._parents = parents
        self._lost = lost
        self.begun: dict[str, str | None] = {}
        """Calls begun in this batch, with their parent calls."""
        self.ended: list[str] = []
        self._sessions: set[str] = set()
        self._new_calls: dict[str, dict[str, Any]] = {}
        self._ended_calls: list[dict[str, Any]] = []
        self._spans: dict[str, Span] = {}
        self._new_spans: list[dict[str, Any]] = []
        self._new_bodies: dict[str, dict[str, Any]] = {}
        self._new_templates: list[dict[str, Any]] = []
        self._running: dict[str, Splice] = {}
        """By call begun in this batch and not ended in it."""
        self._done: list[dict[str, Any]] = []
        """Calls of earlier batches whose requests need no longer be kept apart."""
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
        self._renew(tasks)
        self._many(sessions)
        for patch in self._patches:
            self._patch(patch)
        hot = statements(self._connection.dialect.name)
        hot.add_bodies.run(self._connection, [row for _, row in sorted(self._new_bodies.items())])
        hot.begin_calls.run(self._connection, list(self._new_calls.values()))
        hot.add_running.run(
            self._connection, [running_row(*item) for item in self._running.items()]
        )
        if hot.end_calls.run(self._connection, self._ended_calls) != len(self._ended_calls):
            raise RecordRejected("an ended call was never begun in this store")
        hot.end_running.run(self._connection, self._done)
        hot.add_templates.run(self._connection, self._new_templates)
        hot.add_spans.run(self._connection, self._new_spans)
        self._many(rewards)
        for table in (policies, served, metrics):
            self._renew(table)

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
        base_call, base = state.request_base(begun.parent_call_id)
        data = begun.request_body
        piece = None if base is None else splice(data, base)
        if piece is None or base is None:
            body, base_call = self._whole(data), None
        else:
            body = Body(body_id(data), data, base.depth + 1)
            self._running[begun.id] = piece
        contains = piece is not None and base is not None and piece.contains(base.data)
        state.remember_request(begun.id, body, superseded=base_call if contains else None)
        state.open_calls[begun.id] = OpenCall(piece, begun.headers)
        self._new_calls[begun.id] = begun_row(begun, self._writer_id, body, base_call)
        self.begun[begun.id] = begun.parent_call_id

    def _end(self, ended: CallEnded) -> None:
        state = self._state(ended.session_id)
        growth = self._grow(state, ended)
        self._new_spans += [span_row(span, ended) for span in growth.spans]
        self._spans.update((span.id, span) for span in growth.spans)
        begun = self._begun_call(state, ended.id)
        texts = Texts(
            begun.request,
            dump_json(ended.conversation) if ended.conversation else b"",
            dump_json(ended.message) if ended.message else b"",
            Reply.of(ended.response_body) if ended.response_body else None,
        )
        laid_out = lay_out(texts)
        fields = leaning_fields(begun.headers, ended)
        template = self._template(state, ended.session_id, texts.kind, laid_out, fields)
        if template is None:
            packed = pack_alone(laid_out)
        else:
            packed = pack_texts(laid_out, template.context, self._tokens(growth))
        response_id = body_id(ended.response_body) if ended.response_body else None
        row = ended_row(ended, growth.prompt_span_id, response_id, fields, template, packed)
        if ended.id in self._new_calls:
            self._new_calls[ended.id].update(row)
        else:
            row["_id"] = ended.id
            self._ended_calls.append(row)
        state.has_ended_calls = True
        self.ended.append(ended.id)

    def _grow(self, state: SessionState, ended: CallEnded) -> Growth:
        """The call's place in its session's tree: as it came with it, unless it hangs on a call
        that is not in the database, else by a tree that is read from there."""
        if ended.growth is not None and not self._orphaned(ended.growth):
            return ended.growth
        parent = self.begun.get(ended.id, self._parents.get(ended.id))
        if state.tree is None or ended.growth is not None or self._missing(state, parent):
            state.tree = stored.token_tree(self._connection, ended.session_id)
            state.without_tokens.update(() if parent is None else (parent,))
        return place(state.tree, ended, parent)

    def _missing(self, state: SessionState, parent: str | None) -> bool:
        """Whether the parent's tokens may be in the database and not in the tree."""
        if parent is None or parent in self.ended or parent in state.without_tokens:
            return False
        return state.tree is not None and not state.tree.tips(parent)

    def _orphaned(self, growth: Growth) -> bool:
        return bool(self._lost) and any(
            span.parent_id is not None and span.parent_id.rpartition(".")[0] in self._lost
            for span in growth.spans
        )

    def _tokens(self, growth: Growth) -> CallTokens:
        observed = next((s for s in growth.spans if s.kind is SpanKind.OBSERVED), None)
        before = None if observed is None else observed.parent_id
        return CallTokens(
            None if before is None else self._tokens_of(before),
            None if observed is None else observed.token_ids,
            tuple(s.token_ids for s in growth.spans if s.kind is SpanKind.SAMPLED),
        )

    def _tokens_of(self, span_id: str) -> TokenIds:
        if (span := self._spans.get(span_id)) is not None:
            return span.token_ids
        return stored.span(self._connection, span_id).token_ids

    def _begun_call(self, state: SessionState, call_id: str) -> OpenCall:
        """The call's beginning; what its request adds goes from ``running`` into its own row."""
        if self._running.pop(call_id, None) is None and call_id not in self._new_calls:
            self._done.append({"_id": call_id})
        found = state.open_calls.pop(call_id, None)
        return found or stored.open_call(self._connection, call_id)

    def _template(
        self,
        state: SessionState,
        session_id: str,
        kind: str,
        laid_out: bytes,
        fields: Mapping[str, Any],
    ) -> Template | None:
        """What calls of this kind are stored against: the first of them that serves, but for the
        first call of a session, which may stay its only one."""
        vocabulary_id = None if self._vocabulary is None else self._vocabulary.id
        found = state.templates.get((kind, vocabulary_id))
        if found is None and state.has_ended_calls and len(laid_out) <= _TEMPLATE_REACH:
            # All that a template says: another writer may add one for a call with the same texts.
            named = (session_id, kind, vocabulary_id or "")
            found = Template(
                checksum(*(name.encode() for name in named), laid_out, dump_json(fields)),
                Context.of(kind, laid_out, self._vocabulary),
                fields,
            )
            state.templates[kind, vocabulary_id] = found
            self._new_templates.append(template_row(session_id, kind, found))
        return found

    def _state(self, session_id: str) -> SessionState:
        self._sessions.add(session_id)
        return self._cache.get(
            session_id, lambda: stored.state(self._connection, session_id, self._texts)
        )

    def _open(self, session_id: str) -> None:
        """Nothing of a new session is in the database: its state is not looked for there."""
        self._sessions.add(session_id)
        self._cache.get(session_id, SessionState)

    def _whole(self, data: bytes) -> Body:
        row = whole(data)
        self._new_bodies.setdefault(row.id, body_row(row))
        return Body(row.id, data, 0)

    def _patch(self, patch: Patch) -> None:
        table = _TABLES[patch.table]
        statement = update(table).where(table.c.id == patch.id).values(dict(patch.fields))
        if patch.once is not None:
            statement = statement.where(table.c[patch.once].is_(None))
        if self._connection.execute(statement).rowcount != 1 and patch.once is None:
            raise RecordRejected(f"no row {patch.id} in {patch.table}")

    def _many(self, table: Table) -> None:
        if rows := self._rows.get(table):
            self._connection.execute(insert(table), rows)

    def _renew(self, table: Table) -> None:
        """Adds rows, or replaces those of the same keys."""
        if rows := self._rows.get(table):
            keys = [column.name for column in table.primary_key]
            self._connection.execute(self._upsert(table, keys), _last(rows, keys))

    def _upsert(self, table: Table, keys: Sequence[str]) -> Insert:
        postgres = self._connection.dialect.name == "postgresql"
        statement = postgresql.insert(table) if postgres else sqlite.insert(table)
        others = {c.name: c for c in statement.excluded if c.name not in keys}
        return statement.on_conflict_do_update(index_elements=keys, set_=others)


def _columns(record: Any) -> dict[str, Any]:
    """A flat record's fields, which are its table's columns."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _last(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """The newest row of each key: PostgreSQL refuses to upsert one row twice in a statement."""
    return list({tuple(row[key] for key in keys): row for row in rows}.values())
