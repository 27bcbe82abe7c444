"""The derived rows of sealed sessions, made by the writing thread while no record waits.

The group commit pays nothing for them: a session's texts are indexed and its calls are summed after
it was sealed, a few milliseconds at a time. A session that is not digested yet is complete for its
readers all the same, because they count its calls and read its messages.

A session with a call that still runs is left until that call ends. A call that begins or ends in a
digested session takes its sums away, in its own transaction, and the session is digested again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from sqlalchemy import BindParameter, Connection, bindparam, exists, select

from bridle.store.records import CallStatus
from bridle.store.schema.derived import session_totals
from bridle.store.schema.tables import calls, sessions
from bridle.store.writing.search_index import Documents, add_document, remove_documents
from bridle.store.writing.sums import summarize

_STEP_S: Final = 0.004
"""Seconds after which a step ends, at the end of a document."""
_SESSION: Final[BindParameter[str]] = bindparam("session")
_IS_READY: Final = select(
    exists().where(sessions.c.id == _SESSION, sessions.c.sealed_at.is_not(None)),
    exists().where(calls.c.session_id == _SESSION, calls.c.status == CallStatus.OPEN),
)
_LACKING: Final = (
    select(sessions.c.id)
    .where(
        sessions.c.sealed_at >= 0.0,
        ~exists().where(session_totals.c.session_id == sessions.c.id),
    )
    .order_by(sessions.c.sealed_at.desc())
)


def lacking(connection: Connection) -> list[str]:
    """Return the sealed sessions without derived rows, the last sealed first."""
    return list(connection.execute(_LACKING).scalars())


class Digester:
    """The sessions that wait to be digested, and the one that is being digested."""

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        self._postponed: set[str] = set()
        """Sealed sessions with a call that still runs."""
        self._current: tuple[str, Documents] | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (self._current is not None)

    def add(self, session_ids: Iterable[str]) -> None:
        """Let sessions wait for their digest. Those that are not sealed are ignored later."""
        self._waiting.update(dict.fromkeys(session_ids))

    def changed(self, session_ids: Iterable[str]) -> None:
        """Start again with sessions that were, or could not be, digested before a call changed."""
        for session_id in session_ids:
            if self._current is not None and self._current[0] == session_id:
                self.restart()
            elif session_id in self._postponed:
                self._postponed.discard(session_id)
                self._waiting[session_id] = None

    def restart(self) -> None:
        """Digest the current session anew, after those that wait."""
        if self._current is not None:
            self._waiting[self._current[0]] = None
            self._current = None

    def abandon(self) -> None:
        """Leave the current session without derived rows."""
        self._current = None

    def step(self, connection: Connection, seconds: float = _STEP_S) -> None:
        """Digest in the connection's transaction for a time, and then to the end of a document.

        After an error, call :meth:`restart` or :meth:`abandon`.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            current = self._current or self._begin(connection)
            if current is None:
                return
            session_id, documents = current
            words = documents.next(connection)
            if words is None:
                summarize(connection, session_id)
                self._current = None
            else:
                add_document(connection, session_id, words)

    def _begin(self, connection: Connection) -> tuple[str, Documents] | None:
        while self._waiting:
            session_id = next(iter(self._waiting))
            del self._waiting[session_id]
            sealed, runs = connection.execute(_IS_READY, {"session": session_id}).one()
            if sealed and not runs:
                remove_documents(connection, [session_id])
                self._current = session_id, Documents(connection, session_id)
                return self._current
            if sealed:
                self._postponed.add(session_id)
        return None
