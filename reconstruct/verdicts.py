"""The verdicts on a session's calls as rows, for readers with SQL: their kinds, and why they broke.

They are written when the session is sealed, when its samples are made, and when a person sets a
kind. Readers of :class:`LoadedSession` need none of them: it judges the calls that it loads.
"""

from __future__ import annotations

from sqlalchemy import Connection, delete, insert, select

from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import Reader
from bridle.store.schema.database import transaction
from bridle.store.schema.tables import call_kinds, calls


def judge(reader: Reader, session_id: str) -> None:
    """Judge the calls of a session and store the verdicts.

    Raise :class:`bridle.store.errors.NotFound` if there is no such session.
    """
    session = LoadedSession.load(reader, session_id)
    with transaction(reader.engine) as connection:
        store_verdicts(connection, session)


def store_verdicts(connection: Connection, session: LoadedSession) -> None:
    """Store the verdicts on the session's calls in place of earlier ones."""
    own = select(calls.c.id).where(calls.c.session_id == session.id)
    connection.execute(delete(call_kinds).where(call_kinds.c.call_id.in_(own)))
    rows = [
        {
            "call_id": call.id,
            "kind": call.kind,
            "role": call.role,
            "break_reason": call.break_reason,
        }
        for call in session.calls
    ]
    if rows:
        connection.execute(insert(call_kinds), rows)
