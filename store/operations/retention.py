"""Forgetting sessions: their rows, and every body that nothing else needs.

Bodies that are stored whole are shared between sessions, so what may go is found by marking what
the remaining calls need, with the bases of that; the work is in proportion to the store. Whatever
else it takes to read a call is its own session's. SQLite overwrites what it deletes
(``secure_delete``), in the file and, by emptying it, in the write-ahead log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Engine, delete, func, select, union

from bridle.store.records import CallStatus
from bridle.store.schema.database import transaction
from bridle.store.schema.tables import bodies, calls, metadata, running, sessions, spans

_AT_ONCE: Final = 500
"""Identifiers per statement: databases bound the number of parameters."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What is no longer in the store."""

    sessions: int
    calls: int
    bodies: int


def forget(engine: Engine, session_ids: Sequence[str]) -> Forgotten:
    """Deletes these sessions and what only they needed, in one transaction.

    A call of theirs that still runs fails when it ends: its session is not there any more. Unknown
    identifiers are passed over.
    """
    sqlite = engine.dialect.name == "sqlite"
    gone_sessions = gone_calls = 0
    with transaction(engine) as connection:
        if sqlite:
            connection.exec_driver_sql("PRAGMA secure_delete=ON")
        else:
            # No writer may take up a body again while it is judged to be needed by nobody.
            connection.exec_driver_sql("LOCK TABLE bodies IN SHARE ROW EXCLUSIVE MODE")
        for start in range(0, len(session_ids), _AT_ONCE):
            some = list(session_ids[start : start + _AT_ONCE])
            gone_calls += _delete_owned(connection, some)
            gone = connection.execute(delete(sessions).where(sessions.c.id.in_(some)))
            gone_sessions += gone.rowcount
        gone_bodies = _sweep(connection)
    if sqlite:
        with engine.connect() as connection:
            connection.connection.driver_connection.execute(  # type: ignore[union-attr]
                "PRAGMA wal_checkpoint(TRUNCATE)"
            )
    return Forgotten(gone_sessions, gone_calls, gone_bodies)


def older_than(connection: Connection, created_before: float) -> list[str]:
    """Sessions created before this time that have no running call, oldest first."""
    running = select(calls.c.session_id).where(calls.c.status == CallStatus.OPEN.value)
    query = select(sessions.c.id).where(
        sessions.c.created_at < created_before, sessions.c.id.not_in(running)
    )
    return list(connection.execute(query.order_by(sessions.c.created_at)).scalars())


def _delete_owned(connection: Connection, session_ids: list[str]) -> int:
    """Deletes from every table that names a session; returns how many calls that were."""
    count = select(func.count()).where(calls.c.session_id.in_(session_ids))
    number = connection.execute(count).scalar_one()
    theirs = select(calls.c.id).where(calls.c.session_id.in_(session_ids))
    for table in reversed(metadata.sorted_tables):
        if table in (spans, running):
            connection.execute(delete(table).where(table.c.call_id.in_(theirs)))
        elif table is not sessions and "session_id" in table.c:
            connection.execute(delete(table).where(table.c.session_id.in_(session_ids)))
    return number


def _sweep(connection: Connection) -> int:
    """Deletes the bodies that no call needs, directly or as a base."""
    named = union(
        select(calls.c.request_body_id.label("id")).where(calls.c.request_body_id.is_not(None)),
        select(calls.c.response_body_id.label("id")).where(calls.c.response_body_id.is_not(None)),
    ).subquery()
    needed = select(named.c.id).cte("needed", recursive=True)
    bases = (
        select(bodies.c.base_id)
        .join(needed, bodies.c.id == needed.c.id)
        .where(bodies.c.base_id.is_not(None))
    )
    needed = needed.union(bases)
    # Counted, for SQLite's driver does not tell it of a statement that begins with WITH.
    count = select(func.count()).select_from(bodies)
    before = connection.execute(count).scalar_one()
    connection.execute(delete(bodies).where(bodies.c.id.not_in(select(needed.c.id))))
    return before - connection.execute(count).scalar_one()
