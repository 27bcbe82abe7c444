"""Deletion of sessions. A session owns all rows that are needed to read its calls.

SQLite overwrites what it deletes (``secure_delete``), in the file and, by emptying it, in the
write-ahead log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, delete, func, select

from bridle.store.records import CallStatus
from bridle.store.schema.database import in_pieces, make_whole, transaction
from bridle.store.schema.tables import calls, metadata, sessions
from bridle.store.writing.search_index import purge_words, remove_documents


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Numbers of deleted rows."""

    sessions: int
    calls: int


def forget(engine: Engine, session_ids: Sequence[str]) -> Forgotten:
    """Delete these sessions and everything that belongs to them, in one transaction.

    A call of theirs that still runs fails when it ends, because its session is gone. Unknown
    identifiers are ignored.
    """
    sqlite = engine.dialect.name == "sqlite"
    gone_sessions = gone_calls = 0
    with transaction(engine) as connection:
        if sqlite:
            connection.exec_driver_sql("PRAGMA secure_delete=ON")
        for some in map(list, in_pieces(session_ids)):
            gone_calls += _delete_owned(connection, some)
            gone = connection.execute(delete(sessions).where(sessions.c.id.in_(some)))
            gone_sessions += gone.rowcount
    purge_words(engine)
    make_whole(engine)
    return Forgotten(gone_sessions, gone_calls)


def older_than(connection: Connection, created_before: float) -> list[str]:
    """Return the sessions created before this time that have no running call, oldest first."""
    running = select(calls.c.session_id).where(calls.c.status == CallStatus.OPEN.value)
    query = select(sessions.c.id).where(
        sessions.c.created_at < created_before, sessions.c.id.not_in(running)
    )
    return list(connection.execute(query.order_by(sessions.c.created_at)).scalars())


def _delete_owned(connection: Connection, session_ids: list[str]) -> int:
    """Delete the rows of these sessions from every table that names a session.

    Return the number of deleted calls.
    """
    # On PostgreSQL, nobody may add rows of a session between their deletion and its own.
    connection.execute(
        select(sessions.c.id)
        .where(sessions.c.id.in_(session_ids))
        .order_by(sessions.c.id)
        .with_for_update()
    )
    count = select(func.count()).where(calls.c.session_id.in_(session_ids))
    number = connection.execute(count).scalar_one()
    remove_documents(connection, session_ids)
    theirs = select(calls.c.id).where(calls.c.session_id.in_(session_ids))
    for table in reversed(metadata.sorted_tables):
        if "call_id" in table.c and "session_id" not in table.c:
            connection.execute(delete(table).where(table.c.call_id.in_(theirs)))
        elif table is not sessions and "session_id" in table.c:
            connection.execute(delete(table).where(table.c.session_id.in_(session_ids)))
    return number
