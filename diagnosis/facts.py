"""Counts of the records of a session or of a run, on which findings are based."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Text,
    and_,
    case,
    cast,
    exists,
    func,
    select,
)

from bridle.diagnosis.pages import Placed, SessionNumber, placed_sessions
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.accounts import TokenAccount, stored_account
from bridle.store.reading.damage import json_value
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter, judged, matching
from bridle.store.records import BreakReason, CallKind, CallStatus, Metric, PolicyRecord, RunRecord
from bridle.store.reward import RewardKind
from bridle.store.schema.columns import seconds_between
from bridle.store.schema.tables import calls, rewards, sessions, tasks

EXAMPLES: Final = 5
"""Maximum calls or sessions named as evidence."""
_COMPLETE: Final = calls.c.status == CallStatus.COMPLETE
_NOTED: Final[Mapping[str, ColumnElement[bool]]] = {
    "complete": _COMPLETE,
    "failed": calls.c.status.in_([CallStatus.FAILED, CallStatus.INTERRUPTED]),
    "quarantined": calls.c.status == CallStatus.QUARANTINED,
    "without_ids": _COMPLETE & (func.coalesce(calls.c.sampled_tokens, 0) == 0),
    "length": _COMPLETE & (calls.c.finish_reason == "length"),
    "greedy": _COMPLETE & (json_value(calls.c.sampling, "temperature").as_float() == 0),
    "broken": calls.c.break_reason.is_not(None),
}
"""Conditions on calls, which are counted in one pass over them."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A number, and examples of the things that were counted."""

    number: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a run's sessions, or of one session."""

    run: RunRecord | None
    scored: bool
    """Whether the sessions are meant to be scored: they belong to a run, or their task has data for
    a verifier. A session that somebody only records is not."""
    sessions: Sequence[Placed]
    outcomes: Mapping[str, int]
    """Number of sessions by outcome; ``open`` for sessions that are not sealed."""
    without_calls: Counted
    """Sealed sessions without recorded calls."""
    without_reward: Counted
    """Sealed sessions with calls and no score."""
    findings: Mapping[tuple[str, str], Counted]
    """Sessions with a finding, by its name and mode."""
    calls: int
    """Number of calls. Calls that only count tokens (``CallKind.COUNT``) are left out, here and
    below."""
    complete: int
    failed: Counted
    failures: Mapping[str, int]
    """Number of failed and interrupted calls by reason."""
    quarantined: Counted
    quarantines: Mapping[str, int]
    without_ids: Counted
    """Complete calls whose reply has no token ids."""
    length: Counted
    """Complete calls that ended at the token limit."""
    greedy: Counted
    """Complete calls at temperature 0."""
    breaks: Mapping[str, int]
    """Number of broken calls by the reason of their first difference."""
    broken: Counted
    continued: int
    """Number of calls that continue another."""
    account: TokenAccount
    wait: float | None
    """Mean seconds from a request to its first token."""
    reply: float | None
    """Mean seconds from the first token to the end."""
    metrics: Mapping[str, Sequence[Metric]]
    """The run's numbers by name, each in the order of steps."""
    policies: Sequence[PolicyRecord]
    """The published weights: policies by name, the versions of each oldest first."""


def read_facts(
    reader: Reader,
    number: SessionNumber,
    *,
    run: RunRecord | None = None,
    session: str | None = None,
) -> Facts:
    """Return the facts of a run's sessions, or of one session.

    ``number`` computes a session's one number from its rewards.
    """
    wanted = SessionFilter(run=None if run is None else run.id, session=session)
    chosen = matching(wanted, select(sessions.c.id))
    own = and_(calls.c.session_id.in_(chosen), calls.c.kind != CallKind.COUNT)
    any_call = exists(select(calls.c.id).where(calls.c.session_id == sessions.c.id))
    of_session = select(rewards.c.id).where(rewards.c.session_id == sessions.c.id)
    any_score = exists(of_session.where(rewards.c.kind == RewardKind.SCORE))
    sealed = matching(wanted, select(sessions.c.id)).where(sessions.c.sealed_at.is_not(None))
    outcome = case((sessions.c.sealed_at.is_(None), "open"), else_=sessions.c.outcome)
    with reader.engine.connect() as connection:
        totals = connection.execute(
            select(
                func.count().label("calls"),
                func.count(calls.c.parent_call_id).label("later"),
                func.avg(seconds_between(calls.c.started_at, calls.c.first_token_at)).label("wait"),
                func.avg(seconds_between(calls.c.first_token_at, calls.c.ended_at)).label("reply"),
                *(func.sum(case((of, 1), else_=0)).label(name) for name, of in _NOTED.items()),
            ).where(own)
        ).one()

        def noted(name: str) -> int:
            return int(getattr(totals, name) or 0)  # NULL where there is no call

        def first(query: Select[Any], column: Any) -> tuple[str, ...]:
            shown = query.order_by(column).limit(EXAMPLES)
            return tuple(connection.execute(shown).scalars())

        def of_calls(name: str) -> Counted:
            if not noted(name):
                return Counted(0, ())
            examples = first(select(calls.c.id).where(own, _NOTED[name]), calls.c.id)
            return Counted(noted(name), examples)

        def of_sessions(query: Select[Any]) -> Counted:
            counted = connection.execute(select(func.count()).select_from(query.subquery()))
            found = counted.scalar_one()
            return Counted(found, first(query, sessions.c.id) if found else ())

        def by(column: Any, *conditions: Any) -> dict[str, int]:
            named = select(column.label("name")).where(*conditions).subquery()
            query = select(named.c.name, func.count()).group_by(named.c.name)
            ordered = query.order_by(func.count().desc())
            return {str(name): counted for name, counted in connection.execute(ordered)}

        def calls_by(column: Any, name: str) -> dict[str, int]:
            return by(column, own, _NOTED[name]) if noted(name) else {}

        found = select(rewards.c.name, rewards.c.mode).distinct().order_by(rewards.c.name)
        kinds = connection.execute(
            found.where(rewards.c.kind == RewardKind.FINDING, rewards.c.session_id.in_(chosen))
        ).all()

        def with_finding(name: str, mode: str) -> Counted:
            own = of_session.where(
                rewards.c.kind == RewardKind.FINDING,
                rewards.c.name == name,
                rewards.c.mode == mode,
            )
            return of_sessions(matching(wanted, select(sessions.c.id)).where(exists(own)))

        return Facts(
            run=run,
            scored=run is not None or _is_scored(connection, chosen),
            sessions=placed_sessions(reader, wanted, number),
            outcomes=by(outcome, sessions.c.id.in_(chosen)),
            without_calls=of_sessions(sealed.where(~any_call)),
            without_reward=of_sessions(sealed.where(any_call, ~any_score)),
            findings={(name, mode): with_finding(name, mode) for name, mode in kinds},
            calls=totals.calls,
            complete=noted("complete"),
            failed=of_calls("failed"),
            failures=calls_by(calls.c.reason, "failed"),
            quarantined=of_calls("quarantined"),
            quarantines=calls_by(calls.c.reason, "quarantined"),
            without_ids=of_calls("without_ids"),
            length=of_calls("length"),
            greedy=of_calls("greedy"),
            breaks=_explained(
                reader,
                calls_by(judged(calls.c.break_reason), "broken"),
                select(calls.c.session_id, calls.c.id).where(
                    own, judged(calls.c.break_reason) == BreakReason.UNEXPLAINED
                ),
            ),
            broken=of_calls("broken"),
            continued=totals.later,
            account=stored_account(reader, wanted),
            wait=totals.wait,
            reply=totals.reply,
            metrics={} if run is None else _metrics(reader, run.id),
            policies=() if run is None else reader.policies(run.id),
        )


def _explained(
    reader: Reader, breaks: Mapping[str, int], unexplained: Select[Any]
) -> dict[str, int]:
    """Return the number of breaks by reason, also of sessions without stored verdicts.

    An open session has none. ``unexplained`` selects the session and the id of each call whose
    reason is to be found.
    """
    if BreakReason.UNEXPLAINED not in breaks:
        return dict(breaks)
    with reader.engine.connect() as connection:
        wanted = {tuple(row) for row in connection.execute(unexplained)}
    found = Counter(breaks)
    for session_id in {session_id for session_id, _ in wanted}:
        for call in LoadedSession.load(reader, session_id).calls:
            if (session_id, call.id) in wanted and call.break_reason is not None:
                found[BreakReason.UNEXPLAINED.value] -= 1
                found[call.break_reason.value] += 1
    return {reason: number for reason, number in found.most_common() if number}


def _metrics(reader: Reader, run_id: str) -> dict[str, list[Metric]]:
    metrics: dict[str, list[Metric]] = {}
    for metric in reader.metrics(run_id):
        metrics.setdefault(metric.name, []).append(metric)
    return metrics


def _is_scored(connection: Connection, chosen: Select[Any]) -> bool:
    """Whether any of the sessions belongs to a run, or has a task with data for a verifier."""
    of_task = and_(
        tasks.c.suite == sessions.c.task_suite,
        tasks.c.split == sessions.c.task_split,
        tasks.c.id == sessions.c.task_id,
    )
    query = (
        select(sessions.c.run_id, cast(tasks.c.payload, Text))
        .outerjoin(tasks, of_task)
        .where(sessions.c.id.in_(chosen))
    )
    rows = connection.execute(query)
    return any(run is not None or payload not in (None, "{}") for run, payload in rows)
