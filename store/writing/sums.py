"""The sums over a session's calls, which are stored once the session is sealed.

A write that changes what was summed removes the session's row of ``session_totals`` and its stored
accounts in the same transaction; readers then count its calls, and read its messages, until it is
digested again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final

from sqlalchemy import (
    BindParameter,
    Connection,
    Insert,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)

from bridle.store.reading.totals import count_rows, total_rows
from bridle.store.schema.accounts import BY_RULES, account_rows, accounts_with
from bridle.store.schema.database import in_pieces
from bridle.store.schema.derived import (
    search_documents,
    session_counts,
    session_fates,
    session_totals,
)
from bridle.store.schema.tables import calls, sessions, token_fates

_OF: Final[BindParameter[Any]] = bindparam("sessions", expanding=True)
_ADD_TOTALS: Final = insert(session_totals).from_select(
    list(session_totals.c.keys()), total_rows(sessions.c.id.in_(_OF))
)
_ADD_COUNTS: Final = insert(session_counts).from_select(
    list(session_counts.c.keys()), count_rows(calls.c.session_id.in_(_OF))
)
_DROP_TOTALS: Final = delete(session_totals).where(session_totals.c.session_id.in_(_OF))
_DROP_COUNTS: Final = delete(session_counts).where(session_counts.c.session_id.in_(_OF))
_IS_SUMMED: Final = select(exists().where(session_totals.c.session_id.in_(_OF)))


_CHOSEN: Final = select(sessions.c.id).where(
    sessions.c.id.in_(_OF), exists().where(session_totals.c.session_id == sessions.c.id)
)
_ACCOUNT: Final[BindParameter[str]] = bindparam("account")
_FATES: Final = ["session_id", "account", "fate", "reason", "tokens"]


def _add_fates(rows: Any) -> Insert:
    """Return the statement that stores rows of accounts as those of one account."""
    of = rows.c
    key = of.session_id, of.fate, of.reason
    stored = select(key[0], _ACCOUNT, *key[1:], func.sum(of.tokens)).group_by(*key)
    return insert(session_fates).from_select(_FATES, stored)


_ADD_FATES: Final = _add_fates(account_rows(_CHOSEN).subquery())
_COPY_FATES: Final = _add_fates(
    select(session_fates)
    .where(session_fates.c.session_id.in_(_OF), session_fates.c.account == "")
    .subquery()
)
_RUNS_OF: Final = select(sessions.c.id, sessions.c.run_id).where(
    sessions.c.id.in_(_OF), sessions.c.run_id.is_not(None)
)
_TRAINED_BY: Final = (
    select(token_fates.c.session_id, token_fates.c.run_id)
    .where(token_fates.c.session_id.in_(_OF), token_fates.c.run_id != BY_RULES)
    .distinct()
)
_REOPEN: Final = (
    update(search_documents).where(search_documents.c.session_id.in_(_OF)).values(last=None)
)
_DROP_FATES: Final = delete(session_fates).where(session_fates.c.session_id.in_(_OF))


def summarize(connection: Connection, session_ids: Sequence[str]) -> None:
    """Store the sums over the calls of some sessions, in place of earlier ones."""
    for statement in (_DROP_TOTALS, _DROP_COUNTS, _ADD_COUNTS, _ADD_TOTALS):
        connection.execute(statement, {"sessions": list(session_ids)})
    account_again(connection, session_ids)


def account_again(connection: Connection, session_ids: Collection[str]) -> None:
    """Store the accounts of sessions again, of those that have sums."""
    for some in map(list, in_pieces(list(session_ids))):
        connection.execute(_DROP_FATES, {"sessions": some})
        connection.execute(_ADD_FATES, {"sessions": some, "account": ""})
        trained = connection.execute(_TRAINED_BY, {"sessions": some}).all()
        trainers = Counter(session_id for session_id, _ in trained)
        members: dict[str, set[str]] = {}
        for session_id, run_id in connection.execute(_RUNS_OF, {"sessions": some}):
            for run in accounts_with(run_id):
                members.setdefault(run, set()).add(session_id)
        for session_id, run_id in trained:
            members.setdefault(run_id, set()).add(session_id)
        for run_id, own in members.items():
            # Accounts of a session can differ only where several runs have trained on it.
            same = [one for one in own if trainers[one] < 2]
            connection.execute(_COPY_FATES, {"sessions": same, "account": run_id})
            if several := own.difference(same):
                given = {"sessions": list(several), "account": run_id}
                connection.execute(_add_fates(account_rows(_CHOSEN, run_id).subquery()), given)


def resummarize(connection: Connection, session_id: str) -> None:
    """Store the sums of a session again, if it has any."""
    if connection.execute(_IS_SUMMED, {"sessions": [session_id]}).scalar():
        summarize(connection, [session_id])


def withdraw(connection: Connection, session_ids: Collection[str]) -> None:
    """Remove the stored accounts of sessions whose sums were removed; let their texts be read."""
    for some in map(list, in_pieces(list(session_ids))):
        connection.execute(_DROP_FATES, {"sessions": some})
        connection.execute(_REOPEN, {"sessions": some})
