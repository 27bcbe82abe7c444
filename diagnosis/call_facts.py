"""Counts of the calls of many sessions: from stored sums where there are any, else from the calls.

A run's findings cost by its sessions, not by its calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, and_, func, select, union_all

from bridle.store.reading.call_conditions import NOTED, judged
from bridle.store.reading.damage import number_or_none
from bridle.store.reading.session_filter import SessionFilter, matching
from bridle.store.reading.totals import IS_SUMMED, OWN, count_rows, few_listed, total_rows
from bridle.store.records import BreakReason, CallKind
from bridle.store.schema.columns import unindexed
from bridle.store.schema.derived import NOTES, session_counts, session_totals
from bridle.store.schema.tables import calls, sessions

EXAMPLES: Final = 5
"""Maximum calls or sessions named as evidence."""
_COUNTED: Final = calls.c.kind != CallKind.COUNT
_BY: Final = {"failure": "failed", "quarantine": "quarantined", "break": "broken"}
"""The facts that are counted by value, and the one of :data:`NOTES` that shows whether any is."""


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
    live: Any
    """The ids of the sessions without stored sums: a list, or the query of many."""

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
        query = self._calls(calls.c.id, "noted", noted, EXAMPLES).where(_COUNTED, NOTED[noted])
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
        stored = select(sessions.c.id).join_from(sessions, session_totals, OWN)
        stored = matching(self.wanted, stored).where(session_totals.c.noted_root > 1)
        rows = total_rows(sessions.c.id.in_(self.live)).subquery().c
        live = select(rows.session_id).where(rows.noted_root > 1)
        queries = (stored.order_by(sessions.c.id), live.order_by(rows.session_id))
        found = {
            one for query in queries for one in self.connection.execute(query.limit(most)).scalars()
        }
        return sorted(found)[:most]

    def _calls(self, column: Any, name: str, value: str, limit: int | None = None) -> Select[Any]:
        """Return a query of the calls of sessions that have a call with a value.

        With ``limit``, only so many sessions with stored sums are among them.
        """
        own, of = session_counts.c, calls.c.session_id
        having = select(own.session_id).join_from(session_counts, sessions)
        having = having.where(own.name == name, own.value == value, IS_SUMMED)
        having = matching(self.wanted, having)
        if limit is not None:
            first = having.order_by(own.session_id).limit(limit)
            ids = self.connection.execute(first).scalars().all()
            having = select(sessions.c.id).where(sessions.c.id.in_(ids))
        # One query of ids: PostgreSQL reads all calls for a condition on either of two.
        chosen = union_all(having, select(sessions.c.id).where(sessions.c.id.in_(self.live)))
        return select(column).where(of.in_(chosen)).order_by(of, calls.c.started_at)


def count_calls(connection: Connection, wanted: SessionFilter) -> CallFacts:
    stored = connection.execute(_sums(wanted)).one()
    unsummed = matching(wanted, select(sessions.c.id).where(~IS_SUMMED))
    of_live = [] if stored.summed == stored.sessions else few_listed(connection, unsummed)
    rows = total_rows(sessions.c.id.in_(of_live)).subquery()
    live = connection.execute(select(*_summed(rows.c))).one()
    numbers: Counter[tuple[str, str]] = Counter()
    for noted in NOTES:
        numbers["noted", noted] = int(_added(stored, live, noted))
    for name, noted in _BY.items():
        if not numbers["noted", noted]:
            continue
        counts: list[Any] = [_counts(wanted, name, noted)]
        if stored.summed != stored.sessions:
            found = count_rows(calls.c.session_id.in_(of_live), [name]).subquery().c
            counts.append(select(found.value, func.sum(found.number)).group_by(found.value))
        for query in counts:
            for reason, number in connection.execute(query):
                numbers[name, str(reason)] += int(number_or_none(number) or 0)
    waits, replies = _added(stored, live, "waits"), _added(stored, live, "replies")
    return CallFacts(
        connection,
        wanted,
        calls=int(_added(stored, live, "calls")),
        continued=int(_added(stored, live, "continued")),
        wait=_added(stored, live, "waited_s") / waits if waits else None,
        reply=_added(stored, live, "replied_s") / replies if replies else None,
        numbers=numbers,
        live=of_live,
    )


def _added(stored: Any, live: Any, name: str) -> float:
    return (number_or_none(getattr(stored, name)) or 0) + (number_or_none(getattr(live, name)) or 0)


def _sums(wanted: SessionFilter) -> Select[Any]:
    """Return the sums, the number of ``sessions``, and of those that have stored sums."""
    summed = func.count(session_totals.c.session_id).label("summed")
    query = select(func.count().label("sessions"), summed, *_summed(session_totals.c))
    return matching(wanted, query.outerjoin_from(sessions, session_totals, OWN))


def _summed(rows: Any) -> list[ColumnElement[Any]]:
    """Return the sums of columns of ``session_totals`` over many sessions."""
    names = ("continued", "waits", "waited_s", "replies", "replied_s")
    columns = {name: rows[name] for name in names} | {"calls": rows.counted}
    columns |= {name: rows[f"noted_{name}"] for name in NOTES}
    return [func.sum(column).label(name) for name, column in columns.items()]


def _counts(wanted: SessionFilter, name: str, noted: str) -> Select[Any]:
    """Return the query of the stored numbers by the values of a name, where any call is noted."""
    own = session_counts.c
    of_session = and_(own.session_id == sessions.c.id, unindexed(own.name) == name)
    query = select(own.value, func.sum(own.number)).join_from(sessions, session_totals, OWN)
    query = query.join(session_counts, of_session)
    query = query.where(session_totals.c[f"noted_{noted}"] > 0)
    return matching(wanted, query).group_by(own.value)
