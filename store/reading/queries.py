"""Reading the store: typed rows, exact tokens, exact bodies.

A :class:`Reader` never blocks the writer and sees everything that has been committed. Methods raise
:class:`NotFound` for unknown identifiers, and :class:`StoreUnavailable` if the database cannot be
reached or read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import (
    BindParameter,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Row,
    Select,
    Table,
    bindparam,
    case,
    column,
    func,
    select,
    table,
    tuple_,
)

from bridle.store.call import CallRow as CallRow
from bridle.store.encoding.vocabulary import unpack_vocabulary
from bridle.store.errors import NotFound
from bridle.store.reading import loading as stored
from bridle.store.reading.call_rows import CALLS, SPANS, read_calls, read_span_row
from bridle.store.reading.call_rows import SpanRow as SpanRow
from bridle.store.reading.damage import (
    READ_ERRORS,
    DamagedRows,
    RowDamage,
    as_stored,
    damage_of,
    json_value,
    mended,
    number_or_none,
)
from bridle.store.reading.reward_rows import (
    REWARDS_OF,
    SCORE_NAMES,
    LoneScore,
    read_lone_scores,
    read_rewards,
)
from bridle.store.reading.session_filter import SessionFilter, matching
from bridle.store.records import (
    OBSERVED,
    AttemptRecord,
    CallKind,
    CallStatus,
    Choice,
    Metric,
    PolicyRecord,
    RunRecord,
    SessionRecord,
    Span,
    TaskRecord,
    TokenIds,
)
from bridle.store.reward import Reward
from bridle.store.schema.connections import with_own_errors
from bridle.store.schema.database import connect, in_pieces, make_whole, snapshot
from bridle.store.schema.tables import (
    attempts,
    calls,
    metrics,
    policies,
    runs,
    sessions,
    spans,
    tasks,
    vocabularies,
    writers,
)
from bridle.store.tree import TokenTree

_PAGE: Final = 200
SESSIONS: Final[Select[Any]] = select(*as_stored(sessions))
"""The query whose rows :meth:`Reader.session_record` reads."""
# Built once: a statement that is built anew costs more than most reads.
_SESSIONS: Final[BindParameter[Any]] = bindparam("sessions", expanding=True)
_CALLS_OF: Final[Select[Any]] = CALLS.where(calls.c.session_id.in_(_SESSIONS)).order_by(
    calls.c.session_id, calls.c.started_at, calls.c.id
)
_CALL: Final[Select[Any]] = CALLS.where(calls.c.id == bindparam("call"))
_IDLE: Final = (
    select(sessions.c.id)
    .join(calls, calls.c.session_id == sessions.c.id)
    .where(sessions.c.sealed_at.is_(None), sessions.c.key_hash.is_(None))
    .group_by(sessions.c.id)
    .having(
        func.count() == func.count(calls.c.ended_at),
        func.max(calls.c.ended_at) < bindparam("before"),
    )
)
_COUNTS_OF: Final = (
    select(calls.c.session_id, calls.c.status, func.count().label("number"))
    .where(calls.c.session_id.in_(_SESSIONS))
    .group_by(calls.c.session_id, calls.c.status)
)
_TOKENS_OF: Final = (
    select(calls.c.session_id, spans.c.choice, func.sum(spans.c.length).label("tokens"))
    .join_from(spans, calls, spans.c.call_id == calls.c.id)
    .where(calls.c.session_id.in_(_SESSIONS))
    .group_by(calls.c.session_id, spans.c.choice)
)
_VERSIONS_OF: Final = (
    select(calls.c.session_id, func.max(calls.c.version_start).label("version"))
    .where(calls.c.session_id.in_(_SESSIONS), calls.c.version_start.is_not(None))
    .group_by(calls.c.session_id)
)
_SPANS_OF: Final[Select[Any]] = SPANS.where(calls.c.session_id.in_(_SESSIONS))


_BY_NAME: Final = SESSIONS.where(sessions.c.name == bindparam("name"))
_BY_KEY_HASH: Final = SESSIONS.where(sessions.c.key_hash == bindparam("key_hash"))


class Reader:
    """Queries of a store, given its URL or an engine of ``connect``.

    With an engine, errors are SQLAlchemy's.
    """

    def __init__(self, source: str | Engine) -> None:
        self._owned = isinstance(source, str)
        self.engine = with_own_errors(connect(source)) if isinstance(source, str) else source

    def close(self) -> None:
        """End the connections, if they are this reader's own."""
        if self._owned:
            # The store's writer may have stopped while this reader was in its way.
            make_whole(self.engine, wait=False)
            self.engine.dispose()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- sessions --------------------------------------------------------------------------------

    def session(self, session_id: str) -> SessionRecord:
        found = self._session(SESSIONS.where(sessions.c.id == session_id))
        if found is None:
            raise NotFound(f"no session {session_id}")
        return found

    def session_by_name(self, name: str) -> SessionRecord | None:
        return self._session(_BY_NAME, name=name)

    def session_by_key_hash(self, key_hash: str) -> SessionRecord | None:
        return self._session(_BY_KEY_HASH, key_hash=key_hash)

    def sessions(
        self,
        *,
        limit: int | None = None,
        newest_first: bool = False,
        account: bool = False,
        **conditions: Any,
    ) -> Iterator[SessionRecord]:
        """Yield sessions in the order of their creation, read page by page.

        ``conditions`` are fields of :class:`bridle.store.reading.session_filter.SessionFilter`.
        With ``account``, the condition on a run is that of its account
        (:func:`bridle.store.reading.session_filter.matching`). Raise ``TypeError`` for any other
        condition.
        """
        query = matching(SessionFilter(**conditions), SESSIONS, account=account)
        return self._session_pages(
            query, sessions.c.created_at, limit=limit, newest_first=newest_first
        )

    def sealed_sessions(
        self, after: tuple[float, str] | None = None, *, until: float, run: str | None = None
    ) -> Iterator[SessionRecord]:
        """Yield sessions sealed before ``until`` in the order of their sealing, read page by page.

        ``after`` is the ``(sealed_at, id)`` of the last session that is known already.
        """
        query = matching(SessionFilter(run=run), SESSIONS).where(sessions.c.sealed_at < until)
        return self._session_pages(query, sessions.c.sealed_at, after=after)

    @staticmethod
    def session_record(row: Row[Any]) -> SessionRecord:
        return _session(row)

    def rewards(self, session_id: str) -> list[Reward]:
        """Return a session's rewards, oldest first."""
        return self.rewards_of([session_id])[session_id]

    def rewards_of(
        self, session_ids: Sequence[str], damage: dict[str, list[RowDamage]] | None = None
    ) -> dict[str, list[Reward]]:
        """Return the rewards of several sessions by session, each one's oldest first.

        Rewards that cannot be read are left out, and their damage is added to ``damage`` by
        session.
        """
        with self.engine.connect() as connection:
            rows = _in_pieces(connection, REWARDS_OF, session_ids)
            found = read_rewards(connection, rows, damage)
        return {session_id: found.get(session_id, []) for session_id in session_ids}

    def scores_among(
        self, session_ids: Select[Any]
    ) -> tuple[dict[str, LoneScore], dict[str, list[Reward]]]:
        """Return the rewards of the sessions whose ids a query selects, by session.

        A session whose only reward is a score of the session as a whole is in the first result, any
        other with rewards in the second, as :meth:`rewards_of` returns them.
        """
        with self.engine.connect() as connection:
            lone, others = read_lone_scores(connection, session_ids)
        return lone, self.rewards_of(others)

    def reward_names(self) -> list[str]:
        """Return the names of all scores in the store, sorted."""
        return [row.name for row in self._rows(SCORE_NAMES)]

    # -- calls -----------------------------------------------------------------------------------

    def calls(self, session_id: str) -> list[CallRow]:
        """Return a session's calls in the order of their start."""
        with snapshot(self.engine) as connection, _named(connection, [session_id]):
            return read_calls(connection, _in_pieces(connection, _CALLS_OF, [session_id]))

    def call_ids(self, session_id: str) -> list[str]:
        """Return the ids of a session's calls in the order of their start; turn 1 comes first."""
        query = select(calls.c.id).where(calls.c.session_id == session_id)
        return [row.id for row in self._rows(query.order_by(calls.c.started_at, calls.c.id))]

    def latest_call(self, session_id: str) -> tuple[CallStatus, str | None] | None:
        """Return the status and reason of the session's call that began last.

        Return ``None`` if it has no call.
        """
        query = select(calls.c.status, calls.c.reason).where(calls.c.session_id == session_id)
        row = self._first(query.order_by(calls.c.started_at.desc(), calls.c.id.desc()).limit(1))
        return None if row is None else (_status(row.status), row.reason)

    def call(self, call_id: str) -> CallRow:
        of_call = select(calls.c.session_id).where(calls.c.id == call_id)
        with snapshot(self.engine) as connection:
            session_ids = connection.execute(of_call).scalars().all()
            with _named(connection, session_ids):
                found = read_calls(connection, connection.execute(_CALL, {"call": call_id}).all())
        if not found:
            raise NotFound(f"no call {call_id}")
        return found[0]

    def writer_ids(self) -> frozenset[str]:
        """Return the ids of the processes that write to the store, or did until a moment ago."""
        with self.engine.connect() as connection:
            return frozenset(connection.execute(select(writers.c.id)).scalars())

    def idle_sessions(self, before: float) -> list[str]:
        """Return the ids of open sessions without a key whose calls all ended before ``before``."""
        with self.engine.connect() as connection:
            return list(connection.execute(_IDLE, {"before": before}).scalars())

    def call_counts(self, session_id: str) -> dict[CallStatus, int]:
        """Return the number of the session's calls by status."""
        return self.call_counts_of([session_id])[session_id]

    def call_counts_of(self, session_ids: Sequence[str]) -> dict[str, dict[CallStatus, int]]:
        """Return the number of calls of each session by status."""
        counts: dict[str, dict[CallStatus, int]] = {session_id: {} for session_id in session_ids}
        for row in self._rows_of(_COUNTS_OF, session_ids):
            own, status = counts[row.session_id], _status(row.status)
            own[status] = own.get(status, 0) + row.number
        return counts

    def versions_of(self, session_ids: Sequence[str]) -> dict[str, int]:
        """Return the newest policy version at which a call of each session began.

        Sessions without such a call are left out.
        """
        rows = self._rows_of(_VERSIONS_OF, session_ids)
        return {row.session_id: int(number_or_none(row.version) or 0) for row in rows}

    def token_counts_of(self, session_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return the number of observed and of sampled tokens in each session's tree.

        Each token is counted once.
        """
        counts = dict.fromkeys(session_ids, (0, 0))
        for row in self._rows_of(_TOKENS_OF, session_ids):
            observed, sampled = counts[row.session_id]
            if row.choice == OBSERVED:
                counts[row.session_id] = int(row.tokens or 0), sampled
            else:
                counts[row.session_id] = observed, sampled + int(row.tokens or 0)
        return counts

    def spent(self, session_id: str, aside: Collection[str] = ()) -> tuple[int, int]:
        """Return the number of the session's ended calls, and of the tokens that they sampled.

        The number of calls excludes those in ``aside``, but the number of tokens does not. Calls
        that only count tokens, and calls refused for the budget, are left out.
        """
        sampled = func.nullif(calls.c.sampled_tokens, 0)
        reported = json_value(calls.c.usage, "completion_tokens").as_integer()
        query = select(
            func.sum(case((calls.c.id.in_(aside), 0), else_=1)).label("number"),
            func.sum(func.coalesce(sampled, reported, 0)).label("tokens"),
        ).where(
            calls.c.session_id == session_id,
            calls.c.status != CallStatus.OPEN,
            calls.c.kind != CallKind.COUNT,
            func.coalesce(calls.c.reason, "") != "budget",
        )
        row = self._rows(query)[0]
        return int(row.number or 0), int(row.tokens or 0)

    def judged(self, session_id: str) -> dict[str, dict[str, str | None]]:
        """Return ``kind``, ``role``, ``policy`` and ``break_reason`` of a session's calls by id.

        They are those of the view ``turns``: as a person decided, else as judged from the record,
        else as recorded.
        """
        names = ("kind", "role", "policy", "break_reason")
        columns: list[ColumnElement[Any]] = [column(name) for name in ("call_id", *names)]
        query = select(*columns).select_from(table("turns"))
        rows = self._rows(query.where(column("session_id") == session_id))
        return {row.call_id: {name: getattr(row, name) for name in names} for row in rows}

    def request_body(self, call_id: str) -> bytes:
        """Return the bytes that the client sent.

        Raise ``ValueError`` if the stored bytes are damaged.
        """
        with self.engine.connect() as connection:
            return stored.request(connection, call_id).data

    def response_body(self, call_id: str) -> bytes:
        """Return the bytes that were sent to the client.

        Raise :class:`NotFound` if there were none.

        Raise ``ValueError`` if the stored bytes are damaged.
        """
        with self.engine.connect() as connection:
            return stored.response(connection, call_id)

    # -- tokens ----------------------------------------------------------------------------------

    def spans(self, session_id: str) -> list[Span]:
        """Return a session's token spans, in no particular order.

        Raise ``ValueError`` if one is damaged.
        """
        return list(map(stored.read_span, self._rows_of(_SPANS_OF, [session_id])))

    def prompt_token_ids(self, call_id: str) -> TokenIds | None:
        """Return the ids of a call's prompt, ``uint32[P]``.

        Return ``None`` if the engine did not report them. Raise ``ValueError`` if the session's
        tree is broken.
        """
        call = self.call(call_id)
        if call.prompt_tokens is None:
            return None
        tree = TokenTree(call.session_id, self.spans(call.session_id))
        if call.prompt_span_id not in tree.nodes:
            raise ValueError(f"the prompt of call {call_id} ends in no span of its session")
        return tree.path(call.prompt_span_id, call.prompt_tokens)

    def sampled(self, call_id: str) -> tuple[Choice, ...]:
        """Return the sampled sequences of a call, in the order of its choices."""
        call = self.call(call_id)
        if call.sampled_tokens is None:
            return ()
        query = SPANS.where(spans.c.call_id == call_id, spans.c.choice != OBSERVED)
        found = [read_span_row(row) for row in self._rows(query.order_by(spans.c.choice))]
        return tuple(
            Choice(
                token_ids=row.span.token_ids,
                logprobs=_required(row.span.logprobs, row.span.id),
                versions=row.span.versions,
                finish_reason=row.finish_reason,
                kept=row.span.kept,
                routed_experts=row.span.routed_experts,
            )
            for row in found
        )

    def recorded_of(
        self, session_ids: Sequence[str]
    ) -> tuple[dict[str, list[CallRow]], dict[str, list[SpanRow]]]:
        """Return the calls and the spans of several sessions, by session.

        Calls are in the order of their start. All are read at one moment: otherwise those of a
        session that goes on could contradict each other.

        Raise :class:`DamagedRows` if one of them cannot be read.
        """
        calls_of: dict[str, list[CallRow]] = {session_id: [] for session_id in session_ids}
        spans_of: dict[str, list[SpanRow]] = {session_id: [] for session_id in session_ids}
        with snapshot(self.engine) as connection, _named(connection, session_ids):
            for call in read_calls(connection, _in_pieces(connection, _CALLS_OF, session_ids)):
                calls_of[call.session_id].append(call)
            for row in map(read_span_row, _in_pieces(connection, _SPANS_OF, session_ids)):
                spans_of[row.span.session_id].append(row)
        return calls_of, spans_of

    def vocabulary(self, digest: str) -> list[bytes]:
        """Return the bytes that each token id of a vocabulary stands for.

        Raise ``ValueError`` if they are damaged.
        """
        query = select(vocabularies.c.data).where(vocabularies.c.digest == digest)
        row = self._first(query)
        if row is None:
            raise NotFound(f"no vocabulary {digest}")
        return unpack_vocabulary(row.data)

    # -- runs and training -----------------------------------------------------------------------

    def run(self, run_id: str) -> RunRecord:
        found = self._mended(runs, select(*as_stored(runs)).where(runs.c.id == run_id))
        if not found:
            raise NotFound(f"no run {run_id}")
        return RunRecord(**found[0])

    def runs(self, kind: str | None = None) -> list[RunRecord]:
        """Return the runs, oldest first, all or those of one kind."""
        query = select(*as_stored(runs)).order_by(runs.c.started_at, runs.c.id)
        if kind is not None:
            query = query.where(runs.c.kind == kind)
        return [RunRecord(**values) for values in self._mended(runs, query)]

    def attempts(self, run_id: str) -> list[AttemptRecord]:
        """Return the attempts at a run, oldest first. A run of another program has none."""
        query = select(attempts).where(attempts.c.run_id == run_id).order_by(attempts.c.number)
        return [AttemptRecord(**row._mapping) for row in self._rows(query)]

    def task_of(self, session: SessionRecord) -> TaskRecord | None:
        """Return the task that the session was asked to do; ``None`` if it has none."""
        key = (tasks.c.suite, session.task_suite), (tasks.c.split, session.task_split)
        query = select(*as_stored(tasks)).where(tasks.c.id == session.task_id)
        found = self._mended(tasks, query.where(*(column == value for column, value in key)))
        return TaskRecord(**found[0]) if found else None

    def policies(self, run_id: str) -> list[PolicyRecord]:
        """Return the weights that a run has published, by policy and version."""
        query = select(*as_stored(policies)).where(policies.c.run_id == run_id)
        ordered = query.order_by(policies.c.name, policies.c.version)
        return [PolicyRecord(**values) for values in self._mended(policies, ordered)]

    def metrics(self, run_id: str, name: str | None = None) -> list[Metric]:
        """Return a run's numbers by step; NaN where a value was not a number."""
        query = select(*as_stored(metrics)).where(metrics.c.run_id == run_id)
        if name is not None:
            query = query.where(metrics.c.name == name)
        ordered = query.order_by(metrics.c.step, metrics.c.name)
        found = [Metric(**values) for values in self._mended(metrics, ordered)]
        return [replace(m, value=math.nan) if m.value is None else m for m in found]

    # -- plumbing --------------------------------------------------------------------------------

    def _rows(self, query: Select[Any], **values: Any) -> Sequence[Row[Any]]:
        with self.engine.connect() as connection:
            return connection.execute(query, values).all()

    def _rows_of(self, query: Select[Any], session_ids: Sequence[str]) -> Sequence[Row[Any]]:
        with self.engine.connect() as connection:
            return _in_pieces(connection, query, session_ids)

    def _mended(self, table: Table, query: Select[Any]) -> list[dict[str, Any]]:
        """Return the values of rows of :func:`as_stored`.

        Neutral values stand in place of damaged ones.
        """
        return [mended(table, row)[0] for row in self._rows(query)]

    def _first(self, query: Select[Any], **values: Any) -> Row[Any] | None:
        with self.engine.connect() as connection:
            return connection.execute(query, values).first()

    def _session(self, query: Select[Any], **values: str) -> SessionRecord | None:
        row = self._first(query, **values)
        return None if row is None else _session(row)

    def _session_pages(
        self,
        query: Select[Any],
        place: Column[Any],
        *,
        after: tuple[float, str] | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> Iterator[SessionRecord]:
        """Yield the sessions of a query in the order of the column ``place``, then of their ids."""
        order = tuple_(place, sessions.c.id)
        columns = (place.desc(), sessions.c.id.desc()) if newest_first else (place, sessions.c.id)
        left = limit
        while left is None or left > 0:
            size = _PAGE if left is None else min(left, _PAGE)
            page = query.order_by(*columns).limit(size)
            if after is not None:
                page = page.where(order < after if newest_first else order > after)
            rows = self._rows(page)
            for row in rows:
                yield _session(row)
            if len(rows) < size:
                return
            left = None if left is None else left - size
            after = getattr(rows[-1], place.name), rows[-1].id


@contextmanager
def _named(connection: Connection, session_ids: Sequence[str]) -> Iterator[None]:
    """Raise :class:`DamagedRows`, which names rows and columns, if a row cannot be read."""
    try:
        yield
    except READ_ERRORS as error:
        found = damage_of(connection, session_ids)
        if not found:  # Each value can be read, and what they name is not there.
            problem = f"name something that is missing: {error}"
            found = [RowDamage("sessions", ", ".join(session_ids), "calls", problem)]
        raise DamagedRows(found) from error


def _in_pieces(
    connection: Connection, query: Select[Any], session_ids: Sequence[str]
) -> list[Row[Any]]:
    found: list[Row[Any]] = []
    for some in in_pieces(session_ids):
        found += connection.execute(query, {"sessions": some}).all()
    return found


def _session(row: Row[Any]) -> SessionRecord:
    values, damage = mended(sessions, row)
    task = [values[name] for name in ("task_suite", "task_split", "task_id")]
    if any(task) and not all(task):
        values |= {"task_suite": None, "task_split": None, "task_id": None}
        damage.append(RowDamage("sessions", values["id"], "task_id", "names no task"))
    return DamagedSession(**values, damage=tuple(damage)) if damage else SessionRecord(**values)


def _status(stored: Any) -> CallStatus:
    """Return a status.

    One that cannot be read becomes ``QUARANTINED``, because its call is not to be trusted.
    """
    return CallStatus(stored) if stored in _STATUSES else CallStatus.QUARANTINED


_STATUSES: Final = frozenset(CallStatus)


@dataclass(frozen=True, slots=True)
class DamagedSession(SessionRecord):
    """A session with damaged values in its row, which are replaced by neutral ones."""

    damage: tuple[RowDamage, ...] = ()


def _required(logprobs: Any, span_id: str) -> Any:
    if logprobs is None:
        raise ValueError(f"sampled span {span_id} has no logprobs")
    return logprobs
