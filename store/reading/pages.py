"""What a page of sessions, groups or runs shows, as SQL: filters, order, and figures by session.

A page reads its sessions first and then only what these sessions need, so that its cost is that of
the page and not of the store. Functions take the store's engine and raise what ``Reader`` raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Select,
    Text,
    and_,
    bindparam,
    case,
    cast,
    exists,
    func,
    or_,
    select,
    true,
)

from bridle.store.reading.damage import json_value, number
from bridle.store.reading.queries import SESSIONS, Reader
from bridle.store.records import OBSERVED, CallKind, CallStatus, SessionRecord
from bridle.store.schema.tables import (
    call_kinds,
    call_messages,
    calls,
    rewards,
    sessions,
    token_fates,
)

PREVIEW: Final = 240
"""Characters of the first user message that a line shows."""
BUILDER: Final = "tree"
"""The builder whose account of tokens is shown."""


class SessionOrder(StrEnum):
    """How a list of sessions is sorted."""

    NEWEST = "newest"
    OLDEST = "oldest"
    REWARD = "reward"
    LOWEST = "lowest"
    CALLS = "calls"
    TOKENS = "tokens"
    DURATION = "duration"


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Which sessions are listed; ``None`` for no condition."""

    session: str | None = None
    """The session's id."""
    run: str | None = None
    task: str | None = None
    """The task's own id."""
    group: str | None = None
    harness: str | None = None
    outcome: str | None = None
    """``open`` for sessions that are not sealed."""
    reward: str | None = None
    """Name of a reward that the session has."""
    least: float | None = None
    """Least value of that reward, or of any reward when none is named."""
    most: float | None = None
    version: int | None = None
    """A policy version that sampled in the session."""
    broke: str | None = None
    """Reason of a break in the session; ``any`` for every reason."""
    kind: str | None = None
    status: str | None = None
    """Status of a call in the session."""
    fate: str | None = None
    """``trained``, ``masked`` or ``dropped``: tokens of the session with this fate."""
    reason: str | None = None
    """Why these tokens were masked or dropped."""
    text: str | None = None
    """Text in a message of the session, in any case."""


@dataclass(frozen=True, slots=True)
class SessionLine:
    """A session in a line of a list."""

    record: SessionRecord
    calls: int = 0
    running: int = 0
    failed: int = 0
    """Calls that failed, were quarantined or interrupted."""
    breaks: int = 0
    sampled: int = 0
    """Sampled tokens."""
    model: str | None = None
    versions: tuple[int, int] | None = None
    started_at: float | None = None
    ended_at: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The session's own, by name: of several the latest."""
    preview: str = ""
    """The beginning of the first user message that is not of a side call."""

    @property
    def seconds(self) -> float | None:
        """From the first call's start to the last call's end."""
        if self.started_at is None or self.ended_at is None:
            return None
        return self.ended_at - self.started_at


_OF: Final = calls.c.session_id == sessions.c.id
_REWARD: Final = (
    select(rewards.c.value)
    .where(
        rewards.c.session_id == sessions.c.id,
        rewards.c.call_id.is_(None),
        rewards.c.turn.is_(None),
    )
    .order_by(rewards.c.created_at.desc())
    .limit(1)
    .scalar_subquery()
)
_CALLS: Final = select(func.count()).where(_OF).correlate(sessions).scalar_subquery()
_TOKENS: Final = (
    select(func.coalesce(func.sum(calls.c.sampled_tokens), 0))
    .where(_OF)
    .correlate(sessions)
    .scalar_subquery()
)
_SECONDS: Final = (
    select(func.max(calls.c.ended_at) - func.min(calls.c.started_at))
    .where(_OF)
    .correlate(sessions)
    .scalar_subquery()
)
_ORDERS: Final[Mapping[SessionOrder, tuple[Any, ...]]] = {
    SessionOrder.NEWEST: (sessions.c.created_at.desc(), sessions.c.id.desc()),
    SessionOrder.OLDEST: (sessions.c.created_at, sessions.c.id),
    SessionOrder.REWARD: (_REWARD.desc().nulls_last(), sessions.c.id),
    SessionOrder.LOWEST: (_REWARD.asc().nulls_last(), sessions.c.id),
    SessionOrder.CALLS: (_CALLS.desc(), sessions.c.id),
    SessionOrder.TOKENS: (_TOKENS.desc(), sessions.c.id),
    SessionOrder.DURATION: (_SECONDS.desc().nulls_last(), sessions.c.id),
}


def session_lines(
    reader: Reader,
    wanted: SessionFilter,
    order: SessionOrder = SessionOrder.NEWEST,
    *,
    limit: int,
    offset: int = 0,
) -> list[SessionLine]:
    """A page of the sessions that match."""
    query = matching(wanted, SESSIONS).order_by(*_ORDERS[order])
    with reader.engine.connect() as connection:
        rows = connection.execute(query.limit(limit).offset(offset)).all()
    return lines_of(reader, [reader.session_record(row) for row in rows])


def count_sessions(reader: Reader, wanted: SessionFilter) -> int:
    """How many sessions match."""
    query = matching(wanted, select(func.count()).select_from(sessions))
    with reader.engine.connect() as connection:
        return int(connection.execute(query).scalar_one())


def session_ids(reader: Reader, wanted: SessionFilter) -> list[str]:
    """The sessions that match, oldest first."""
    query = matching(wanted, select(sessions.c.id)).order_by(sessions.c.created_at, sessions.c.id)
    with reader.engine.connect() as connection:
        return list(connection.execute(query).scalars())


def lines_of(reader: Reader, records: Sequence[SessionRecord]) -> list[SessionLine]:
    """The lines of these sessions, in their order."""
    ids = [record.id for record in records]
    over = reader.rewards_of(ids)
    with reader.engine.connect() as connection:
        figures = {row.session_id: row for row in connection.execute(_FIGURES, {"sessions": ids})}
        shown = {
            row.session_id: row.preview
            for row in connection.execute(_PREVIEWS, {"sessions": ids})
            if row.preview
        }
    lines = []
    for record in records:
        given = {r.name: r.value for r in over[record.id] if r.call_id is None and r.turn is None}
        found = figures.get(record.id)
        if found is None:
            lines.append(SessionLine(record, rewards=given))
            continue
        oldest, newest = number(found.oldest), number(found.newest)
        lines.append(
            SessionLine(
                record,
                calls=found.number,
                running=int(found.running),
                failed=int(found.failed),
                breaks=int(found.breaks),
                sampled=int(found.sampled or 0),
                model=None if found.model is None else str(found.model),
                versions=None if oldest is None or newest is None else (oldest, newest),
                started_at=number(found.started_at),
                ended_at=number(found.ended_at),
                rewards=given,
                preview=" ".join(shown.get(record.id, "").split()),
            )
        )
    return lines


def matching(wanted: SessionFilter, query: Select[Any]) -> Select[Any]:
    """``query`` over sessions with the filter's conditions."""
    for column, value in (
        ("id", wanted.session),
        ("run_id", wanted.run),
        ("task_id", wanted.task),
        ("group_id", wanted.group),
        ("harness", wanted.harness),
    ):
        if value is not None:
            query = query.where(sessions.c[column] == value)
    if wanted.outcome == "open":
        query = query.where(sessions.c.sealed_at.is_(None))
    elif wanted.outcome is not None:
        query = query.where(sessions.c.outcome == wanted.outcome)
    for condition in (*_call_conditions(wanted), *_other_conditions(wanted)):
        query = query.where(condition)
    return query


def _call_conditions(wanted: SessionFilter) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if wanted.version is not None:
        found.append(
            and_(calls.c.version_start <= wanted.version, calls.c.version_end >= wanted.version)
        )
    if wanted.broke == "any":
        found.append(calls.c.break_reason.is_not(None))
    elif wanted.broke is not None:
        found.append(calls.c.break_reason == wanted.broke)
    if wanted.status is not None:
        found.append(calls.c.status == wanted.status)
    if wanted.kind is not None:
        derived = (
            select(call_kinds.c.kind).where(call_kinds.c.call_id == calls.c.id).scalar_subquery()
        )
        found.append(func.coalesce(calls.c.kind_set, derived, calls.c.kind) == wanted.kind)
    if not found:
        return []
    return [exists(select(calls.c.id).where(_OF, *found))]


def _other_conditions(wanted: SessionFilter) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    rewarded = []
    if wanted.reward is not None:
        rewarded.append(rewards.c.name == wanted.reward)
    if wanted.least is not None:
        rewarded.append(rewards.c.value >= wanted.least)
    if wanted.most is not None:
        rewarded.append(rewards.c.value <= wanted.most)
    if rewarded:
        own = rewards.c.session_id == sessions.c.id
        found.append(exists(select(rewards.c.id).where(own, *rewarded)))
    if wanted.fate is not None:
        fated = [token_fates.c.fate == wanted.fate, token_fates.c.tokens > 0]
        if wanted.reason:
            fated.append(token_fates.c.reason == wanted.reason)
        own = token_fates.c.session_id == sessions.c.id
        found.append(
            exists(select(token_fates.c.fate).where(own, token_fates.c.builder == BUILDER, *fated))
        )
    if wanted.text:
        said = select(calls.c.session_id).join(call_messages, call_messages.c.call_id == calls.c.id)
        contains = or_(
            call_messages.c.content.icontains(wanted.text, autoescape=True),
            cast(call_messages.c.content_json, Text).icontains(wanted.text, autoescape=True),
            cast(call_messages.c.tool_calls, Text).icontains(wanted.text, autoescape=True),
            call_messages.c.reasoning.icontains(wanted.text, autoescape=True),
        )
        found.append(exists(said.where(_OF, contains)))
    return found


_SESSIONS: Final[BindParameter[Any]] = bindparam("sessions", expanding=True)


def _number(condition: Any) -> Any:
    return func.sum(case((condition, 1), else_=0))


_FIGURES: Final = (
    select(
        calls.c.session_id,
        func.count().label("number"),
        _number(calls.c.status == CallStatus.OPEN).label("running"),
        _number(
            calls.c.status.in_([CallStatus.FAILED, CallStatus.QUARANTINED, CallStatus.INTERRUPTED])
        ).label("failed"),
        _number(calls.c.break_reason.is_not(None)).label("breaks"),
        func.sum(calls.c.sampled_tokens).label("sampled"),
        func.max(func.coalesce(calls.c.model_served, calls.c.model_requested)).label("model"),
        func.min(calls.c.version_start).label("oldest"),
        func.max(calls.c.version_end).label("newest"),
        func.min(calls.c.started_at).label("started_at"),
        func.max(calls.c.ended_at).label("ended_at"),
    )
    .where(calls.c.session_id.in_(_SESSIONS))
    .group_by(calls.c.session_id)
)
_first_call = (
    select(calls.c.id)
    .where(
        calls.c.session_id == sessions.c.id, calls.c.kind.not_in([CallKind.SIDE, CallKind.COUNT])
    )
    .order_by(calls.c.started_at, calls.c.id)
    .limit(1)
    .correlate(sessions)
    .scalar_subquery()
)
_FIRST_PART: Final = json_value(call_messages.c.content_json, 0, "text").as_string()
"""Of a message whose content is a list of parts."""
_PREVIEWS: Final = select(
    sessions.c.id.label("session_id"),
    (
        select(func.substr(func.coalesce(call_messages.c.content, _FIRST_PART, ""), 1, PREVIEW))
        .where(
            call_messages.c.call_id == _first_call,
            call_messages.c.choice == OBSERVED,
            call_messages.c.role == "user",
        )
        .order_by(call_messages.c.position)
        .limit(1)
        .correlate(sessions)
        .scalar_subquery()
    ).label("preview"),
).where(sessions.c.id.in_(_SESSIONS))


@dataclass(frozen=True, slots=True)
class Choices:
    """What the filters of a list offer."""

    harnesses: Sequence[str]
    outcomes: Sequence[str]
    rewards: Sequence[str]
    runs: Sequence[str]


def choices(reader: Reader) -> Choices:
    """The values that sessions of the store have."""
    with reader.engine.connect() as connection:

        def known(column: Any) -> list[str]:
            query = select(column).where(column.is_not(None)).distinct().order_by(column)
            return list(connection.execute(query).scalars())

        return Choices(
            known(sessions.c.harness),
            known(sessions.c.outcome),
            known(rewards.c.name),
            known(sessions.c.run_id)[::-1],
        )


class Placed(NamedTuple):
    """A session's place in a run: its group, task, reward and policy version. A page has one for
    every session of a store, and a tuple is made in a third of a dataclass's time."""

    id: str
    group: str | None
    task: str | None
    created_at: float
    reward: float | None
    """The latest that it got as a whole."""
    version: int | None
    """The oldest that sampled in it."""


def placed_sessions(reader: Reader, wanted: SessionFilter) -> list[Placed]:
    """All sessions that match, oldest first, each in a few numbers."""
    version = select(func.min(calls.c.version_start)).where(_OF).correlate(sessions)
    query = matching(
        wanted,
        select(
            sessions.c.id,
            sessions.c.group_id,
            sessions.c.task_id,
            sessions.c.created_at,
            _REWARD.label("reward"),
            version.scalar_subquery().label("version"),
        ),
    ).order_by(sessions.c.created_at, sessions.c.id)
    with reader.engine.connect() as connection:
        return [
            Placed(
                row.id,
                row.group_id,
                row.task_id,
                number(row.created_at) or 0.0,
                number(row.reward),
                number(row.version),
            )
            for row in connection.execute(query)
        ]


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Where the sampled tokens of sessions went, by the accounts that their samples left."""

    sessions: int
    accounted: int
    """Sessions whose samples have been made."""
    captured: int
    """Sampled tokens of all sessions."""
    fates: Mapping[tuple[str, str], int]
    """Tokens by ``(fate, reason)``."""


def token_account(reader: Reader, wanted: SessionFilter) -> TokenAccount:
    """The account of the sessions that match, which are found once for all its figures."""
    chosen = matching(wanted, select(sessions.c.id)).cte("chosen")
    inside = select(chosen.c.id)
    own = token_fates.c.session_id.in_(inside) & (token_fates.c.builder == BUILDER)
    captured = select(func.sum(calls.c.sampled_tokens)).where(calls.c.session_id.in_(inside))
    totals = select(
        select(func.count()).select_from(chosen).scalar_subquery().label("sessions"),
        select(func.count(token_fates.c.session_id.distinct()))
        .where(own)
        .scalar_subquery()
        .label("accounted"),
        captured.scalar_subquery().label("captured"),
    ).cte("totals")
    fates = (
        select(token_fates.c.fate, token_fates.c.reason, func.sum(token_fates.c.tokens).label("of"))
        .where(own)
        .group_by(token_fates.c.fate, token_fates.c.reason)
        .cte("fates")
    )
    query = select(totals, fates).select_from(totals.outerjoin(fates, true()))
    with reader.engine.connect() as connection:
        rows = connection.execute(query).all()
    return TokenAccount(
        rows[0].sessions,
        rows[0].accounted,
        int(rows[0].captured or 0),
        {(row.fate, row.reason): int(row.of) for row in rows if row.fate is not None},
    )
