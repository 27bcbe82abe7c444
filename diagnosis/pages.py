"""Pages of sessions, groups or runs, as SQL: filters, order, and figures by session.

A page reads its sessions first and then only the rows that these sessions need, so its cost does
not grow with the store. Functions take the store's reader and raise the errors that ``Reader``
raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BindParameter,
    bindparam,
    case,
    func,
    literal,
    select,
)

from bridle.diagnosis.titles import title
from bridle.store.reading.damage import json_value, number_or_none
from bridle.store.reading.queries import SESSIONS, Reader
from bridle.store.reading.session_filter import SessionFilter, matching
from bridle.store.reading.totals import (
    BREAKS,
    CALLS,
    OLDEST_VERSION,
    OWN,
    PROMPTED,
    SECONDS,
    TOKENS,
    total_rows,
)
from bridle.store.records import OBSERVED, CallKind, CallStatus, SessionRecord
from bridle.store.reward import Reward
from bridle.store.schema.derived import session_counts, session_totals
from bridle.store.schema.tables import (
    call_messages,
    calls,
    sessions,
)

SessionNumber = Callable[[str | None, Sequence[Reward]], float | None]
"""A function that returns a session's one number, given its run and its rewards; ``None`` if it has
none."""


class SessionOrder(StrEnum):
    """The column that orders a list of sessions.

    Texts ascend, and numbers and times descend, unless the order is reversed. Sessions without the
    value come last.
    """

    NEWEST = "newest"
    TASK = "task"
    HARNESS = "harness"
    OUTCOME = "outcome"
    REWARD = "reward"
    CALLS = "calls"
    BREAKS = "breaks"
    PROMPTED = "prompted"
    TOKENS = "tokens"
    VERSION = "version"
    DURATION = "duration"


_ASCENDING: Final = frozenset({SessionOrder.TASK, SessionOrder.HARNESS, SessionOrder.OUTCOME})


@dataclass(frozen=True, slots=True)
class SessionLine:
    """A session in a line of a list."""

    record: SessionRecord
    calls: int = 0
    running: int = 0
    failed: int = 0
    """Number of calls that failed, were quarantined or interrupted."""
    breaks: int = 0
    prompted: int | None = None
    """Number of prompt tokens of all calls; ``None`` if the engine counted none."""
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


_SUMMED: Final = SESSIONS.outerjoin_from(sessions, session_totals, OWN)
_KEYS: Final[Mapping[SessionOrder, Any]] = {
    SessionOrder.TASK: sessions.c.task_id,
    SessionOrder.HARNESS: sessions.c.harness,
    SessionOrder.OUTCOME: sessions.c.outcome,
    SessionOrder.CALLS: CALLS,
    SessionOrder.BREAKS: BREAKS,
    SessionOrder.PROMPTED: PROMPTED,
    SessionOrder.TOKENS: TOKENS,
    SessionOrder.VERSION: OLDEST_VERSION,
    SessionOrder.DURATION: SECONDS,
}


def is_ascending(order: SessionOrder, *, reverse: bool) -> bool:
    """Return whether the least value comes first."""
    return (order in _ASCENDING) != reverse


def _ordered(order: SessionOrder, *, ascending: bool) -> tuple[Any, ...]:
    """Return the terms of an order that is not by reward."""
    if order is SessionOrder.NEWEST:
        # Without a place for nulls, so that PostgreSQL reads the index.
        return tuple(
            column.asc() if ascending else column.desc()
            for column in (sessions.c.created_at, sessions.c.id)
        )
    key = _KEYS[order]
    return (key.asc() if ascending else key.desc()).nulls_last(), sessions.c.id


def session_lines(
    reader: Reader,
    wanted: SessionFilter,
    order: SessionOrder = SessionOrder.NEWEST,
    *,
    number: SessionNumber,
    limit: int,
    offset: int = 0,
    reverse: bool = False,
) -> list[SessionLine]:
    """Return a page of the sessions that match, in an order or its reverse.

    ``number`` gives the values that an order by reward compares.
    """
    ascending = is_ascending(order, reverse=reverse)
    if order is SessionOrder.REWARD:
        placed = placed_sessions(reader, wanted, number, MOST_PLACED)
        sign = 1 if ascending else -1
        placed.sort(key=lambda one: (one.reward is None, sign * (one.reward or 0.0), one.id))
        page = {one.id: place for place, one in enumerate(placed[offset : offset + limit])}
        query = SESSIONS.where(sessions.c.id.in_(page))
    else:
        page = {}
        query = matching(wanted, _SUMMED).order_by(*_ordered(order, ascending=ascending))
        query = query.limit(limit).offset(offset)
    with reader.engine.connect() as connection:
        records = [reader.session_record(row) for row in connection.execute(query)]
    return lines_of(reader, sorted(records, key=lambda one: page.get(one.id, 0)), number)


def newest(reader: Reader, wanted: SessionFilter, most: int) -> SessionFilter:
    """Return the filter for the newest of the sessions that match, ``most`` or a few more."""
    query = matching(wanted, select(sessions.c.created_at)).order_by(sessions.c.created_at.desc())
    with reader.engine.connect() as connection:
        oldest = connection.execute(query.offset(most - 1).limit(1)).scalar()
    return wanted if oldest is None else replace(wanted, since=oldest)


def count_sessions(reader: Reader, wanted: SessionFilter, *, account: bool = False) -> int:
    """Return the number of sessions that match, with ``account`` those of the run's account."""
    query = matching(wanted, select(func.count()).select_from(sessions), account=account)
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
        figures = {row.session_id: row for row in connection.execute(_STORED, {"sessions": ids})}
        others = [session_id for session_id in ids if session_id not in figures]
        figures |= {
            row.session_id: row for row in connection.execute(_FIGURES, {"sessions": others})
        }
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
        oldest, newest = number_or_none(found.version_start), number_or_none(found.version_end)
        prompted = number_or_none(found.prompt_tokens)
        lines.append(
            SessionLine(
                record,
                calls=int(number_or_none(found.calls) or 0),
                running=int(number_or_none(found.running) or 0),
                failed=int(number_or_none(found.failed) or 0),
                breaks=int(number_or_none(found.breaks) or 0),
                prompted=None if prompted is None else int(prompted),
                sampled=int(number_or_none(found.sampled_tokens) or 0),
                model=None if found.model is None else str(found.model),
                versions=None if oldest is None or newest is None else (oldest, newest),
                started_at=number_or_none(found.started_at),
                ended_at=number_or_none(found.ended_at),
                given=given,
                reward=reward,
                title=title(asked.get(record.id, ()), record.harness),
            )
        )
    return lines


_SESSIONS: Final[BindParameter[Any]] = bindparam("sessions", expanding=True)
_FIGURES: Final = total_rows(sessions.c.id.in_(_SESSIONS)).add_columns(
    func.count(case((calls.c.status == CallStatus.OPEN, 1))).label("running")
)
_STORED: Final = select(session_totals, literal(0).label("running")).where(
    session_totals.c.session_id.in_(_SESSIONS)
)
"""The figures of sessions that have stored sums, as :data:`_FIGURES` counts them."""
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
    models: Sequence[str]
    """The models of sealed sessions."""


def choices(reader: Reader) -> Choices:
    """Return the values that sessions of the store have."""
    with reader.engine.connect() as connection:

        def known(column: Any, *conditions: Any) -> list[str]:
            present = select(column).where(column.is_not(None), *conditions)
            query = present.distinct().order_by(column)
            return list(connection.execute(query).scalars())

        return Choices(
            known(sessions.c.harness),
            known(sessions.c.outcome),
            reader.reward_names(),
            known(sessions.c.run_id)[::-1],
            known(session_counts.c.value, session_counts.c.name == "model"),
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


MOST_PLACED: Final = 5_000
"""The number of sessions, the newest ones, that a page of groups or an order by reward looks at."""
MOST_OF_RUN: Final = 2_000
"""The number of a run's sessions, the newest ones, whose groups and findings its page shows."""


def placed_sessions(
    reader: Reader, wanted: SessionFilter, number: SessionNumber, most: int | None = None
) -> list[Placed]:
    """Return the sessions that match, oldest first, each in a few numbers.

    With ``most``, only the newest ones are returned, so many at most.
    """
    columns = (
        *(sessions.c.id, sessions.c.group_id, sessions.c.task_id, sessions.c.created_at),
        sessions.c.run_id,
        OLDEST_VERSION.label("version"),
    )
    summed = select(*columns).outerjoin_from(sessions, session_totals, OWN)
    newest_first = sessions.c.created_at.desc(), sessions.c.id.desc()
    query = matching(wanted, summed).order_by(*newest_first).limit(most)
    ids = matching(wanted, select(sessions.c.id))
    chosen = ids if most is None else ids.order_by(*newest_first).limit(most)
    lone, given = reader.scores_among(chosen)
    factors: dict[tuple[str | None, str, str], float | None] = {}
    placed = []
    with reader.engine.connect() as connection:
        for session_id, group, task, created, run, version in connection.execute(query).all():
            score = lone.get(session_id)
            if score is None:
                value = number(run, given.get(session_id, ()))
            else:
                rule = (run, score.name, score.source)
                if rule not in factors:
                    factors[rule] = number(run, [replace(score.reward(session_id), value=1.0)])
                factor = factors[rule]
                value = None if factor is None else factor * score.value
            at = number_or_none(created) or 0.0
            placed.append(Placed(session_id, group, task, at, value, number_or_none(version)))
    return placed[::-1]
