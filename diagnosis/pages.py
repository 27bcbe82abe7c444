"""Pages of sessions, groups or runs, as SQL: filters, order, and figures by session.

A page reads its sessions first and then only the rows that these sessions need, so its cost does
not grow with the store. Functions take the store's reader and raise the errors that ``Reader``
raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BindParameter,
    bindparam,
    case,
    func,
    select,
)

from bridle.diagnosis.titles import title
from bridle.store.reading.damage import json_value, number_or_none
from bridle.store.reading.queries import SESSIONS, Reader
from bridle.store.reading.session_filter import SessionFilter, matching
from bridle.store.records import OBSERVED, CallKind, CallStatus, SessionRecord
from bridle.store.reward import Reward
from bridle.store.schema.columns import seconds_between
from bridle.store.schema.tables import (
    call_messages,
    calls,
    sessions,
)

SessionNumber = Callable[[str | None, Sequence[Reward]], float | None]
"""A function that returns a session's one number, given its run and its rewards; ``None`` if it has
none."""


class SessionOrder(StrEnum):
    """The order of a list of sessions."""

    NEWEST = "newest"
    OLDEST = "oldest"
    REWARD = "reward"
    LOWEST = "lowest"
    CALLS = "calls"
    TOKENS = "tokens"
    DURATION = "duration"


@dataclass(frozen=True, slots=True)
class SessionLine:
    """A session in a line of a list."""

    record: SessionRecord
    calls: int = 0
    running: int = 0
    failed: int = 0
    """Number of calls that failed, were quarantined or interrupted."""
    breaks: int = 0
    sampled: int = 0
    """Number of sampled tokens."""
    model: str | None = None
    versions: tuple[int, int] | None = None
    started_at: float | None = None
    ended_at: float | None = None
    given: tuple[Reward, ...] = ()
    """All rewards and findings of the session and its calls, oldest first."""
    reward: float | None = None
    """The session's number, by the rule of its run."""
    title: str = ""
    """The user's task: the last message of the first call, side calls left out, without the text
    that the harness wrote around it."""

    @property
    def seconds(self) -> float | None:
        """Seconds from the first call's start to the last call's end."""
        if self.started_at is None or self.ended_at is None:
            return None
        return self.ended_at - self.started_at


_OF: Final = calls.c.session_id == sessions.c.id
_CALLS: Final = select(func.count()).where(_OF).correlate(sessions).scalar_subquery()
_TOKENS: Final = (
    select(func.coalesce(func.sum(calls.c.sampled_tokens), 0))
    .where(_OF)
    .correlate(sessions)
    .scalar_subquery()
)
_SECONDS: Final = (
    select(seconds_between(func.min(calls.c.started_at), func.max(calls.c.ended_at)))
    .where(_OF)
    .correlate(sessions)
    .scalar_subquery()
)
_ORDERS: Final[Mapping[SessionOrder, tuple[Any, ...]]] = {
    SessionOrder.NEWEST: (sessions.c.created_at.desc(), sessions.c.id.desc()),
    SessionOrder.OLDEST: (sessions.c.created_at, sessions.c.id),
    SessionOrder.CALLS: (_CALLS.desc(), sessions.c.id),
    SessionOrder.TOKENS: (_TOKENS.desc(), sessions.c.id),
    SessionOrder.DURATION: (_SECONDS.desc().nulls_last(), sessions.c.id),
}


def session_lines(
    reader: Reader,
    wanted: SessionFilter,
    order: SessionOrder = SessionOrder.NEWEST,
    *,
    number: SessionNumber,
    limit: int,
    offset: int = 0,
) -> list[SessionLine]:
    """Return a page of the sessions that match.

    ``number`` gives the values that an order by reward compares.
    """
    if order in (SessionOrder.REWARD, SessionOrder.LOWEST):
        placed = placed_sessions(reader, wanted, number)
        sign = -1 if order is SessionOrder.REWARD else 1
        placed.sort(key=lambda one: (one.reward is None, sign * (one.reward or 0.0), one.id))
        page = {one.id: place for place, one in enumerate(placed[offset : offset + limit])}
        query = SESSIONS.where(sessions.c.id.in_(page))
    else:
        page = {}
        query = matching(wanted, SESSIONS).order_by(*_ORDERS[order])
        query = query.limit(limit).offset(offset)
    with reader.engine.connect() as connection:
        records = [reader.session_record(row) for row in connection.execute(query)]
    return lines_of(reader, sorted(records, key=lambda one: page.get(one.id, 0)), number)


def count_sessions(reader: Reader, wanted: SessionFilter) -> int:
    """Return the number of sessions that match."""
    query = matching(wanted, select(func.count()).select_from(sessions))
    with reader.engine.connect() as connection:
        return int(connection.execute(query).scalar_one())


def session_ids(reader: Reader, wanted: SessionFilter) -> list[str]:
    """Return the ids of the sessions that match, oldest first."""
    query = matching(wanted, select(sessions.c.id)).order_by(sessions.c.created_at, sessions.c.id)
    with reader.engine.connect() as connection:
        return list(connection.execute(query).scalars())


def lines_of(
    reader: Reader, records: Sequence[SessionRecord], number: SessionNumber
) -> list[SessionLine]:
    """Return the lines of these sessions, in their order."""
    ids = [record.id for record in records]
    over = reader.rewards_of(ids)
    with reader.engine.connect() as connection:
        figures = {row.session_id: row for row in connection.execute(_FIGURES, {"sessions": ids})}
        asked: dict[str, list[str]] = {}
        for session_id, *texts in connection.execute(_ASKED, {"sessions": ids}):
            asked.setdefault(session_id, []).extend(filter(None, texts))
    lines = []
    for record in records:
        given = tuple(over[record.id])
        reward = number(record.run_id, given)
        found = figures.get(record.id)
        if found is None:
            lines.append(SessionLine(record, given=given, reward=reward))
            continue
        oldest, newest = number_or_none(found.oldest), number_or_none(found.newest)
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
                started_at=number_or_none(found.started_at),
                ended_at=number_or_none(found.ended_at),
                given=given,
                reward=reward,
                title=title(asked.get(record.id, ())),
            )
        )
    return lines


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
_PARTS: Final = 8
"""Maximum parts of a message whose texts are searched for a title."""
_LOOKED_AT: Final = 16_384
"""Maximum characters that are searched in each."""
_others = call_messages.alias()


def _position(pick: Callable[[Any], Any]) -> Any:
    """Return ``max`` or ``min`` of the positions of a user's messages in the first call."""
    return (
        select(pick(_others.c.position))
        .where(
            _others.c.call_id == _first_call,
            _others.c.choice == OBSERVED,
            _others.c.role == "user",
        )
        .correlate(sessions)
        .scalar_subquery()
    )


_ASKED: Final = (
    select(
        sessions.c.id.label("session_id"),
        *(
            func.substr(text, 1, _LOOKED_AT)
            for text in (
                call_messages.c.content,
                *(
                    json_value(call_messages.c.content_json, at, "text").as_string()
                    for at in range(_PARTS)
                ),
            )
        ),
    )
    .join_from(sessions, call_messages, call_messages.c.call_id == _first_call)
    .where(
        sessions.c.id.in_(_SESSIONS),
        call_messages.c.choice == OBSERVED,
        call_messages.c.role == "user",
        call_messages.c.position.in_([_position(func.max), _position(func.min)]),
    )
    .order_by(sessions.c.id, call_messages.c.position.desc())
)
"""Texts of the last and the first message of a user in a session's first call, the last first."""


@dataclass(frozen=True, slots=True)
class Choices:
    """The values that the filters of a list offer."""

    harnesses: Sequence[str]
    outcomes: Sequence[str]
    rewards: Sequence[str]
    runs: Sequence[str]


def choices(reader: Reader) -> Choices:
    """Return the values that sessions of the store have."""
    with reader.engine.connect() as connection:

        def known(column: Any) -> list[str]:
            query = select(column).where(column.is_not(None)).distinct().order_by(column)
            return list(connection.execute(query).scalars())

        return Choices(
            known(sessions.c.harness),
            known(sessions.c.outcome),
            reader.reward_names(),
            known(sessions.c.run_id)[::-1],
        )


class Placed(NamedTuple):
    """A session's place in a run: its group, task, reward and policy version.

    A page has one for every session of a store; it is a tuple because a dataclass takes three times
    as long to make.
    """

    id: str
    group: str | None
    task: str | None
    created_at: float
    reward: float | None
    """The session's number, by the rule of its run."""
    version: int | None
    """The oldest policy version that sampled in the session."""


def placed_sessions(reader: Reader, wanted: SessionFilter, number: SessionNumber) -> list[Placed]:
    """Return all sessions that match, oldest first, each in a few numbers."""
    version = select(func.min(calls.c.version_start)).where(_OF).correlate(sessions)
    query = matching(
        wanted,
        select(
            sessions.c.id,
            sessions.c.group_id,
            sessions.c.task_id,
            sessions.c.created_at,
            sessions.c.run_id,
            version.scalar_subquery().label("version"),
        ),
    ).order_by(sessions.c.created_at, sessions.c.id)
    given = reader.rewards_among(matching(wanted, select(sessions.c.id)))
    with reader.engine.connect() as connection:
        return [
            Placed(
                row.id,
                row.group_id,
                row.task_id,
                number_or_none(row.created_at) or 0.0,
                number(row.run_id, given.get(row.id, ())),
                number_or_none(row.version),
            )
            for row in connection.execute(query)
        ]
