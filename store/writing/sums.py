"""The sums over a session's calls, which are stored once the session is sealed.

A write that changes what was summed removes the session's row of ``session_totals`` in the same
transaction (:func:`withdraw`); readers then count its calls until it is summed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

from sqlalchemy import (
    BindParameter,
    Column,
    ColumnElement,
    Connection,
    Select,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    literal,
    select,
    union_all,
)

from bridle.store.reading.call_conditions import NOTED, UNUSABLE, judged, kind_of
from bridle.store.records import CallKind
from bridle.store.schema.accounts import account_rows
from bridle.store.schema.columns import seconds_between
from bridle.store.schema.database import in_pieces
from bridle.store.schema.derived import (
    LONGEST_VALUE,
    NOTES,
    session_counts,
    session_fates,
    session_totals,
)
from bridle.store.schema.tables import calls, sessions

_SESSION: Final[BindParameter[str]] = bindparam("session")
_OWN: Final = calls.c.session_id == _SESSION
_COUNTED: Final = calls.c.kind != CallKind.COUNT


def _sum(value: ColumnElement[Any]) -> ColumnElement[Any]:
    return func.coalesce(func.sum(case((_COUNTED, value))), 0)


_WAIT: Final = seconds_between(calls.c.started_at, calls.c.first_token_at)
_REPLY: Final = seconds_between(calls.c.first_token_at, calls.c.ended_at)
_TOTALS: Final = (
    select(
        _SESSION.label("session_id"),
        func.count(),
        func.coalesce(func.sum(calls.c.sampled_tokens), 0),
        func.min(calls.c.version_start),
        func.max(calls.c.version_end),
        func.min(calls.c.started_at),
        func.max(calls.c.ended_at),
        func.count(case((calls.c.status.in_(UNUSABLE), 1))),
        func.count(calls.c.break_reason),
        func.max(func.coalesce(calls.c.model_served, calls.c.model_requested)),
        func.count(case((_COUNTED, 1))),
        func.count(case((_COUNTED, calls.c.parent_call_id))),
        func.count(case((_COUNTED, _WAIT))),
        _sum(_WAIT),
        func.count(case((_COUNTED, _REPLY))),
        _sum(_REPLY),
        *(func.count(case((and_(_COUNTED, NOTED[name]), 1))) for name in NOTES),
    )
    .where(_OWN)
    .select_from(calls)
)


def _counted(name: str, value: ColumnElement[Any], *conditions: ColumnElement[bool]) -> Select[Any]:
    """Return the query of the numbers of a session's calls by one fact."""
    named = select(func.substr(value, 1, LONGEST_VALUE).label("value")).where(_OWN, *conditions)
    found = named.subquery()
    return (
        select(_SESSION, literal(name), found.c.value, func.count())
        .where(found.c.value.is_not(None))
        .group_by(found.c.value)
    )


def _own(column: Column[Any]) -> ColumnElement[Any]:
    return column


_COUNTS: Final = union_all(
    _counted("status", _own(calls.c.status)),
    _counted("kind", kind_of()),
    _counted("break", judged(calls.c.break_reason), calls.c.break_reason.is_not(None)),
    *(_counted("noted", literal(name), _COUNTED, of) for name, of in NOTED.items()),
    _counted("failure", func.coalesce(calls.c.reason, "None"), _COUNTED, NOTED["failed"]),
    _counted("quarantine", func.coalesce(calls.c.reason, "None"), _COUNTED, NOTED["quarantined"]),
)
_ADD_TOTALS: Final = insert(session_totals).from_select(list(session_totals.c.keys()), _TOTALS)
_ADD_COUNTS: Final = insert(session_counts).from_select(list(session_counts.c.keys()), _COUNTS)
_OF: Final[BindParameter[Any]] = bindparam("sessions", expanding=True)
_WITHDRAW: Final = delete(session_totals).where(session_totals.c.session_id.in_(_OF))
_DROP_COUNTS: Final = delete(session_counts).where(session_counts.c.session_id.in_(_OF))
_IS_SUMMED: Final = select(exists().where(session_totals.c.session_id == _SESSION))


_CHOSEN: Final = select(sessions.c.id).where(
    sessions.c.id.in_(_OF), exists().where(session_totals.c.session_id == sessions.c.id)
)
_account: Final = account_rows(_CHOSEN).subquery()
_ADD_FATES: Final = insert(session_fates).from_select(
    ["session_id", "fate", "reason", "trained_by", "tokens"],
    select(
        _account.c.session_id,
        _account.c.fate,
        _account.c.reason,
        func.max(_account.c.trained_by),
        func.sum(_account.c.tokens),
    ).group_by(_account.c.session_id, _account.c.fate, _account.c.reason),
)
_DROP_FATES: Final = delete(session_fates).where(session_fates.c.session_id.in_(_OF))


def summarize(connection: Connection, session_id: str) -> None:
    """Store the sums over a session's calls, in place of earlier ones."""
    withdraw(connection, [session_id])
    connection.execute(_DROP_COUNTS, {"sessions": [session_id]})
    connection.execute(_ADD_COUNTS, {"session": session_id})
    connection.execute(_ADD_TOTALS, {"session": session_id})
    account_again(connection, [session_id])


def account_again(connection: Connection, session_ids: Collection[str]) -> None:
    """Store the accounts of sessions again, of those that have sums."""
    for some in map(list, in_pieces(list(session_ids))):
        connection.execute(_DROP_FATES, {"sessions": some})
        connection.execute(_ADD_FATES, {"sessions": some})


def resummarize(connection: Connection, session_id: str) -> None:
    """Store the sums of a session again, if it has any."""
    if connection.execute(_IS_SUMMED, {"session": session_id}).scalar():
        summarize(connection, session_id)


def withdraw(connection: Connection, session_ids: Iterable[str]) -> int:
    """Let readers count the calls of these sessions. Return how many of them had sums."""
    wanted: Collection[str] = list(session_ids)
    return sum(
        connection.execute(_WITHDRAW, {"sessions": list(some)}).rowcount
        for some in in_pieces(list(wanted))
    )
