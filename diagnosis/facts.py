"""Counts of the records of a session or of a run, on which findings are based."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, Text, and_, case, cast, exists, func, select

from bridle.diagnosis.call_facts import EXAMPLES, CallFacts, Counted, count_calls
from bridle.diagnosis.pages import Placed, SessionNumber, newest, placed_sessions
from bridle.reconstruct.kinds.roots import unlinked_roots
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.accounts import TokenAccount, stored_account
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter, matching
from bridle.store.reading.totals import CALLS, OWN
from bridle.store.records import BreakReason, Metric, PolicyRecord, RunRecord
from bridle.store.reward import RewardKind
from bridle.store.schema.derived import session_totals
from bridle.store.schema.tables import rewards, sessions, tasks

_MOST_READ: Final = 50
"""Maximum number of sessions whose calls are read to find unlinked roots."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a run's sessions, or of one session."""

    run: RunRecord | None
    scored: bool
    """True if the sessions are meant to be scored: they belong to a run, or their task has data for
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
    unlinked: Counted
    """Calls that continue none although their session has another root for its work
    (:func:`bridle.reconstruct.kinds.roots.unlinked_roots`)."""
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
    most: int | None = None,
) -> Facts:
    """Return the facts of a run's sessions, or of one session.

    ``number`` computes a session's one number from its rewards. With ``most``, the facts are those
    of the newest sessions, about so many.
    """
    wanted = SessionFilter(run=None if run is None else run.id, session=session)
    if most is not None:
        wanted = newest(reader, wanted, most)
    chosen = matching(wanted, select(sessions.c.id))
    placed = placed_sessions(reader, wanted, number)
    with reader.engine.connect() as connection:
        of = count_calls(connection, wanted)
        of_sessions = _SessionFacts(connection, wanted)
        return Facts(
            run=run,
            scored=run is not None or _is_scored(connection, chosen),
            sessions=placed,
            outcomes=of_sessions.outcomes(),
            without_calls=of_sessions.without_calls(),
            without_reward=of_sessions.without_reward(),
            findings=of_sessions.with_findings(),
            calls=of.calls,
            complete=of.number("noted", "complete"),
            failed=of.counted("failed"),
            failures=of.by("failure"),
            quarantined=of.counted("quarantined"),
            quarantines=of.by("quarantine"),
            without_ids=of.counted("without_ids"),
            length=of.counted("length"),
            greedy=of.counted("greedy"),
            breaks=_explained(reader, of),
            broken=of.counted("broken"),
            continued=of.continued,
            unlinked=_unlinked(reader, of),
            account=stored_account(reader, wanted),
            wait=of.wait,
            reply=of.reply,
            metrics={} if run is None else _metrics(reader, run.id),
            policies=() if run is None else reader.policies(run.id),
        )


class _SessionFacts:
    """The counts of sessions that match a filter."""

    def __init__(self, connection: Connection, wanted: SessionFilter) -> None:
        self._connection = connection
        self._wanted = wanted
        sealed = self._matching().where(sessions.c.sealed_at.is_not(None))
        self._with_calls = CALLS > 0
        self._sealed = sealed
        of_session = select(rewards.c.id).where(rewards.c.session_id == sessions.c.id)
        self._of_session = of_session

    def _matching(self) -> Select[Any]:
        query = select(sessions.c.id).outerjoin_from(sessions, session_totals, OWN)
        return matching(self._wanted, query)

    def outcomes(self) -> dict[str, int]:
        outcome = case((sessions.c.sealed_at.is_(None), "open"), else_=sessions.c.outcome)
        named = matching(self._wanted, select(outcome.label("name"))).subquery()
        query = select(named.c.name, func.count()).group_by(named.c.name)
        ordered = query.order_by(func.count().desc())
        return {str(name): counted for name, counted in self._connection.execute(ordered)}

    def without_calls(self) -> Counted:
        return self._counted(self._sealed.where(~self._with_calls))

    def without_reward(self) -> Counted:
        scored = exists(self._of_session.where(rewards.c.kind == RewardKind.SCORE))
        return self._counted(self._sealed.where(~scored, self._with_calls))

    def with_findings(self) -> dict[tuple[str, str], Counted]:
        chosen = matching(self._wanted, select(sessions.c.id))
        found = select(rewards.c.name, rewards.c.mode).distinct().order_by(rewards.c.name)
        finding = rewards.c.kind == RewardKind.FINDING
        kinds = self._connection.execute(
            found.where(finding, rewards.c.session_id.in_(chosen))
        ).all()
        return {
            (name, mode): self._counted(
                self._matching().where(
                    exists(
                        self._of_session.where(
                            finding, rewards.c.name == name, rewards.c.mode == mode
                        )
                    )
                )
            )
            for name, mode in kinds
        }

    def _counted(self, query: Select[Any]) -> Counted:
        number = self._connection.execute(
            select(func.count()).select_from(query.subquery())
        ).scalar_one()
        if not number:
            return Counted(0, ())
        shown = query.order_by(sessions.c.id).limit(EXAMPLES)
        return Counted(number, tuple(self._connection.execute(shown).scalars()))


def _explained(reader: Reader, of: CallFacts) -> dict[str, int]:
    """Return the number of breaks by reason, also of sessions without stored verdicts.

    An open session has none.
    """
    breaks = of.by("break")
    if BreakReason.UNEXPLAINED not in breaks:
        return breaks
    wanted = of.unexplained()
    found = Counter(breaks)
    for session_id in {session_id for session_id, _ in wanted}:
        for call in LoadedSession.load(reader, session_id).calls:
            if (session_id, call.id) in wanted and call.break_reason is not None:
                found[BreakReason.UNEXPLAINED.value] -= 1
                found[call.break_reason.value] += 1
    return {reason: number for reason, number in found.most_common() if number}


def _unlinked(reader: Reader, of: CallFacts) -> Counted:
    """Return the unlinked roots of at most :data:`_MOST_READ` sessions."""
    found = [
        call.id
        for session_id in of.with_roots(_MOST_READ)
        for call in unlinked_roots(LoadedSession.load(reader, session_id).calls)
    ]
    return Counted(len(found), tuple(found[:EXAMPLES]))


def _metrics(reader: Reader, run_id: str) -> dict[str, list[Metric]]:
    metrics: dict[str, list[Metric]] = {}
    for metric in reader.metrics(run_id):
        metrics.setdefault(metric.name, []).append(metric)
    return metrics


def _is_scored(connection: Connection, chosen: Select[Any]) -> bool:
    """Return whether a session belongs to a run, or has a task with data for a verifier."""
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
