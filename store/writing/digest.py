"""The derived rows of sealed sessions, made by the writing thread while no record waits.

The group commit pays nothing for them: they are made after a session was sealed, a few milliseconds
at a time. Sums come first, because pages read those of many sessions and they cost little; then the
texts of one session after the other are indexed. A session that is not digested yet is complete for
its readers all the same, because they count its calls and read its messages.

A session with a call that still runs is left until that call ends. A call that begins or ends in a
digested session takes its sums away, in its own transaction, and the session is digested again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
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
_FEW: Final = 8
"""Sessions whose sums wait for the index of others."""
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
    """The sessions that wait to be digested.

    A session waits until the step that digests it is committed, so that a step that fails changes
    nothing.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        """Sessions that wait for their sums."""
        self._summed: dict[str, None] = {}
        """Sessions that wait for the index of their texts."""
        self._postponed: set[str] = set()
        """Sealed sessions with a call that still runs."""
        self._current: tuple[str, Documents] | None = None
        """The first of the summed sessions, once its index has begun."""
        self._taken: list[str] = []
        """The sessions of the latest step."""
        self._at_once = _AT_ONCE

    def __len__(self) -> int:
        # In this order: other threads ask, while a session moves from the first to the second.
        return len(self._waiting) + len(self._summed)

    def add(self, session_ids: Iterable[str]) -> None:
        """Let sessions wait for their digest. Those that are not sealed are ignored later."""
        for session_id in session_ids:
            self._waiting[session_id] = None
            self._leave_index(session_id)

    def changed(self, session_ids: Iterable[str]) -> None:
        """Start again with sessions that were, or could not be, digested before a call changed."""
        again = [one for one in session_ids if one in self._postponed or one in self._summed]
        self._postponed.difference_update(again)
        self.add(again)

    def step(self, connection: Connection, seconds: float = _STEP_S) -> Callable[[], None]:
        """Sum some sessions in the connection's transaction. If few wait, index texts of one.

        Texts are indexed for a time, and then to the end of a document. Return a function to call
        after the commit. Call :meth:`failed` if there is none.
        """
        if len(self._waiting) >= (_FEW if self._summed else 1):
            return self._sum(connection)
        return self._index(connection, time.monotonic() + seconds)

    def failed(self, *, at_fault: bool) -> None:
        """Begin the texts of the current session anew after a step that failed.

        With ``at_fault``, a session of the step is the cause. They are taken one by one, and the
        one that fails alone is left as it is.
        """
        self._current = None
        if at_fault and len(self._taken) == 1:
            self._waiting.pop(self._taken[0], None)
            self._leave_index(self._taken[0])
        elif at_fault:
            self._at_once = 1

    def _sum(self, connection: Connection) -> Callable[[], None]:
        self._taken = taken = list(islice(self._waiting, self._at_once))
        if ready := self._ready(connection, taken):
            summarize(connection, ready)

        def settle() -> None:
            self._summed.update(dict.fromkeys(ready))
            for session_id in taken:
                del self._waiting[session_id]

        return settle

    def _index(self, connection: Connection, end: float) -> Callable[[], None]:
        """Index documents of the current session, or of another one, until a time."""
        self._at_once = _AT_ONCE
        self._taken = taken = list(islice(self._summed, 1))
        is_last = True
        if self._current is None and self._ready(connection, taken):
            remove_documents(connection, taken)
            self._current = taken[0], Documents(connection, taken[0])
        if self._current is not None:
            session_id, documents = self._current
            is_last = False
            while not is_last and time.monotonic() < end:
                words, is_last = documents.next(connection)
                add_document(connection, session_id, words, is_last=is_last)

        def settle() -> None:
            if is_last:
                self._leave_index(*taken)

        return settle

    def _leave_index(self, *session_ids: str) -> None:
        for session_id in session_ids:
            self._summed.pop(session_id, None)
            if self._current is not None and self._current[0] == session_id:
                self._current = None

    def _ready(self, connection: Connection, session_ids: list[str]) -> list[str]:
        """Return the sealed sessions among these. Those with a running call are postponed."""
        found = connection.execute(_READY, {"sessions": session_ids}).all()
        self._postponed.update(session_id for session_id, runs in found if runs)
        return [session_id for session_id, runs in found if not runs]
