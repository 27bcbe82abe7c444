"""Counts of the calls of many sessions: from stored sums where there are any, else from the calls.

A run's findings cost by its sessions, not by its calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, case, func, select

from bridle.store.reading.call_conditions import NOTED, judged
from bridle.store.reading.damage import number_or_none
from bridle.store.reading.session_filter import SessionFilter, matching
from bridle.store.reading.totals import IS_SUMMED
from bridle.store.records import BreakReason, CallKind
from bridle.store.schema.columns import seconds_between
from bridle.store.schema.derived import LONGEST_VALUE, session_counts, session_totals
from bridle.store.schema.tables import calls, sessions

EXAMPLES: Final = 5
"""Maximum calls or sessions named as evidence."""
_COUNTED: Final = calls.c.kind != CallKind.COUNT
_BY: Final[Mapping[str, tuple[ColumnElement[Any], ColumnElement[bool]]]] = {
    "failure": (func.coalesce(calls.c.reason, "None"), NOTED["failed"]),
    "quarantine": (func.coalesce(calls.c.reason, "None"), NOTED["quarantined"]),
    "break": (judged(calls.c.break_reason), NOTED["broken"]),
}
"""The values by which calls are counted, and the calls that are counted by them."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A number, and examples of the things that were counted."""

    number: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallFacts:
    """The counts of the calls of sessions that match ``wanted``, without those that only count."""

    connection: Connection
    wanted: SessionFilter
    calls: int
    continued: int
    wait: float | None
    """Mean seconds from a request to its first token."""
    reply: float | None
    """Mean seconds from the first token to the end."""
    numbers: Mapping[tuple[str, str], int]
    """The numbers of calls by the names and values of ``session_counts``."""

    def number(self, name: str, value: str) -> int:
        return self.numbers.get((name, value), 0)

    def by(self, name: str) -> dict[str, int]:
        """Return the numbers of a name by value, the largest first."""
        found = Counter({value: n for (one, value), n in self.numbers.items() if one == name and n})
        return dict(found.most_common())

    def counted(self, noted: str) -> Counted:
        """Return the calls that meet a condition of ``NOTED``, with the first by their ids."""
        number = self.number("noted", noted)
        if not number:
            return Counted(0, ())
        query = self._calls(calls.c.id, "noted", noted).where(_COUNTED, NOTED[noted])
        first = self.connection.execute(query.limit(EXAMPLES)).scalars()
        return Counted(number, tuple(first))

    def unexplained(self) -> set[tuple[str, str]]:
        """Return the session and the id of each call whose break has no reason yet."""
        reason = BreakReason.UNEXPLAINED
        query = self._calls(calls.c.session_id, "break", reason).add_columns(calls.c.id)
        rows = self.connection.execute(query.where(judged(calls.c.break_reason) == reason))
        return {(row.session_id, row.id) for row in rows}

    def with_roots(self, most: int) -> list[str]:
        """Return the ids of the sessions with several calls that continue none, ``most`` of them.

        Only calls that do the work of their session count (``NOTED["root"]``).
        """
        own = session_counts.c
        stored = select(own.session_id).where(
            own.name == "noted", own.value == "root", own.number > 1
        )
        live = select(calls.c.session_id).where(_live(self.wanted), NOTED["root"])
        live = live.group_by(calls.c.session_id).having(func.count() > 1)
        chosen = select(sessions.c.id).where(
            sessions.c.id.in_(stored) & IS_SUMMED | sessions.c.id.in_(live)
        )
        query = matching(self.wanted, chosen).order_by(sessions.c.id).limit(most)
        return list(self.connection.execute(query).scalars())

    def _calls(self, column: Any, name: str, value: str) -> Select[Any]:
        """Return a query of the calls of sessions that have a call with a value."""
        having = select(session_counts.c.session_id).where(
            session_counts.c.name == name, session_counts.c.value == value
        )
        chosen = select(sessions.c.id).where(sessions.c.id.in_(having) | ~IS_SUMMED)
        return (
            select(column)
            .where(calls.c.session_id.in_(matching(self.wanted, chosen)))
            .order_by(calls.c.session_id, calls.c.started_at)
        )


def count_calls(connection: Connection, wanted: SessionFilter) -> CallFacts:
    """Return the counts of the calls of the sessions that match."""
    stored = connection.execute(_sums(wanted)).one()
    live = connection.execute(_live_sums(wanted)).one()
    numbers: Counter[tuple[str, str]] = Counter()
    for name, value, number in connection.execute(_counts(wanted)):
        numbers[str(name), str(value)] += int(number_or_none(number) or 0)
    for noted in NOTED:
        numbers["noted", noted] += int(getattr(live, noted) or 0)
    if live.calls:
        for name, (value, condition) in _BY.items():
            for reason, number in connection.execute(_live_counts(wanted, value, condition)):
                numbers[name, str(reason)] += number
    waits, replies = _added(stored, live, "waits"), _added(stored, live, "replies")
    return CallFacts(
        connection,
        wanted,
        calls=int(_added(stored, live, "calls")),
        continued=int(_added(stored, live, "continued")),
        wait=_added(stored, live, "waited_s") / waits if waits else None,
        reply=_added(stored, live, "replied_s") / replies if replies else None,
        numbers=numbers,
    )


def _added(stored: Any, live: Any, name: str) -> float:
    return (number_or_none(getattr(stored, name)) or 0) + (number_or_none(getattr(live, name)) or 0)


def _sums(wanted: SessionFilter) -> Select[Any]:
    own = session_totals.c
    names = ("continued", "waits", "waited_s", "replies", "replied_s")
    return select(
        func.sum(own.counted).label("calls"), *(func.sum(own[name]).label(name) for name in names)
    ).where(own.session_id.in_(matching(wanted, select(sessions.c.id))))


def _counts(wanted: SessionFilter) -> Select[Any]:
    own = session_counts.c
    chosen = matching(wanted, select(sessions.c.id).where(IS_SUMMED))
    return (
        select(own.name, own.value, func.sum(own.number))
        .where(own.session_id.in_(chosen), own.name.in_(["noted", *_BY]))
        .group_by(own.name, own.value)
    )


def _live(wanted: SessionFilter) -> ColumnElement[bool]:
    chosen = matching(wanted, select(sessions.c.id).where(~IS_SUMMED))
    return calls.c.session_id.in_(chosen) & _COUNTED


def _live_sums(wanted: SessionFilter) -> Select[Any]:
    wait = seconds_between(calls.c.started_at, calls.c.first_token_at)
    reply = seconds_between(calls.c.first_token_at, calls.c.ended_at)
    columns: list[ColumnElement[Any]] = [
        func.count().label("calls"),
        func.count(calls.c.parent_call_id).label("continued"),
        func.count(wait).label("waits"),
        func.sum(wait).label("waited_s"),
        func.count(reply).label("replies"),
        func.sum(reply).label("replied_s"),
        *(func.sum(case((of, 1), else_=0)).label(name) for name, of in NOTED.items()),
    ]
    return select(*columns).where(_live(wanted))


def _live_counts(
    wanted: SessionFilter, value: ColumnElement[Any], condition: ColumnElement[bool]
) -> Select[Any]:
    named = select(func.substr(value, 1, LONGEST_VALUE).label("value"))
    found = named.where(_live(wanted), condition).subquery()
    return select(found.c.value, func.count()).group_by(found.c.value)
