"""The derived rows of sealed sessions, made by the writing thread while no record waits.

The group commit pays nothing for them: they are made after a session was sealed, a few milliseconds
at a time. The sums of all sessions come first, because pages read them of many sessions at once and
they cost little; then the texts of one session after the other are indexed. A session that is not
digested yet is complete for its readers all the same, because they count its calls and read its
messages.

A session with a call that still runs is left until that call ends. A call that begins or ends in a
digested session takes its sums away, in its own transaction, and the session is digested again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from typing import Final

from sqlalchemy import Connection, bindparam, exists, select

from bridle.store.records import CallStatus
from bridle.store.schema.derived import is_indexed, session_totals
from bridle.store.schema.tables import calls, sessions
from bridle.store.writing.search_index import Documents, add_document, remove_documents
from bridle.store.writing.sums import summarize

_STEP_S: Final = 0.004
"""Seconds after which a step ends, at the end of a document."""
_RUNS: Final = calls.c.status == CallStatus.OPEN
_AT_ONCE: Final = 16
"""Sessions that are summed at once, for little more than the cost of one."""
_READY: Final = (
    select(sessions.c.id, exists().where(calls.c.session_id == sessions.c.id, _RUNS))
    .where(sessions.c.id.in_(bindparam("sessions", expanding=True)))
    .where(sessions.c.sealed_at.is_not(None))
)
_LACKING: Final = (
    select(sessions.c.id)
    .where(
        sessions.c.sealed_at >= 0.0,
        ~exists().where(session_totals.c.session_id == sessions.c.id) | ~is_indexed(sessions),
    )
    .order_by(sessions.c.sealed_at.desc())
)


def lacking(connection: Connection) -> list[str]:
    """Return the sealed sessions that lack derived rows, the last sealed first."""
    return list(connection.execute(_LACKING).scalars())


class Digester:
    """The sessions that wait to be digested, and the one whose texts are being indexed."""

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        """Sessions that wait for their sums."""
        self._summed: dict[str, None] = {}
        """Sessions that wait for the index of their texts."""
        self._postponed: set[str] = set()
        """Sealed sessions with a call that still runs."""
        self._current: tuple[str, Documents] | None = None
        self._at_once = _AT_ONCE
        self._taken: list[str] = []
        """The sessions of the latest step."""

    def __len__(self) -> int:
        return len(self._waiting.keys() | self._summed) + (self._current is not None)

    def add(self, session_ids: Iterable[str]) -> None:
        """Let sessions wait for their digest. Those that are not sealed are ignored later."""
        self._waiting.update(dict.fromkeys(session_ids))

    def changed(self, session_ids: Iterable[str]) -> None:
        """Start again with sessions that were, or could not be, digested before a call changed."""
        for session_id in session_ids:
            if self._current is not None and self._current[0] == session_id:
                self._current = None
                self._waiting[session_id] = None
            elif session_id in self._postponed:
                self._postponed.discard(session_id)
                self._waiting[session_id] = None

    def restart(self, *, at_fault: bool = False) -> None:
        """Take the sessions of a failed step again.

        With ``at_fault``, one of them is the cause. They are taken one by one, and the one that
        fails alone is left as it is.
        """
        self._current = None
        if at_fault and len(self._taken) == 1:
            self._at_once, self._taken = _AT_ONCE, []
        elif at_fault:
            self._at_once = 1
        self._waiting = dict.fromkeys(self._taken) | self._waiting

    def step(self, connection: Connection, seconds: float = _STEP_S) -> None:
        """Sum some sessions in the connection's transaction. If none waits, index texts of one.

        Texts are indexed for a time, and then to the end of a document. Call :meth:`restart` if the
        transaction fails.
        """
        if self._waiting:
            self._taken = list(islice(self._waiting, self._at_once))
            for session_id in self._taken:
                del self._waiting[session_id]
            if ready := self._ready(connection, self._taken):
                summarize(connection, ready)
                self._summed.update(dict.fromkeys(ready))
        elif self._current or self._summed:
            self._index(connection, time.monotonic() + seconds)

    def _index(self, connection: Connection, end: float) -> None:
        """Index documents of the current session, or of another one, until a time."""
        if self._current is None:
            session_id = next(iter(self._summed))
            del self._summed[session_id]
            self._taken = [session_id]
            if not self._ready(connection, [session_id]):
                return
            remove_documents(connection, [session_id])
            self._current = session_id, Documents(connection, session_id)
        session_id, documents = self._current
        self._taken = [session_id]
        is_last = False
        while not is_last and time.monotonic() < end:
            words, is_last = documents.next(connection)
            add_document(connection, session_id, words, is_last=is_last)
        if is_last:
            self._current = None

    def _ready(self, connection: Connection, session_ids: list[str]) -> list[str]:
        """Return the sealed sessions among these. Those with a running call are postponed."""
        found = dict(connection.execute(_READY, {"sessions": session_ids}).all())
        self._postponed.update(session_id for session_id, runs in found.items() if runs)
        return [session_id for session_id, runs in found.items() if not runs]
