"""Open the store for a command, and find the sessions that its arguments name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bridle.cli.terminal import fail
from bridle.store.errors import NotFound
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord
from bridle.store.schema.database import database_url, refuse_newer

_NO_SESSION_YET: Final = "the store holds no session yet"
_RUNS_NAMED: Final = 5
"""The number of runs listed in the message about an unknown one."""


@contextmanager
def reader(store: str) -> Iterator[Reader]:
    """Yield a reader of ``store``.

    The store must exist, and its schema must not be newer than this Bridle knows.
    """
    require_store(store)
    with Reader(store) as opened:
        refuse_newer(opened.engine)
        yield opened


def require_store(store: str) -> None:
    """End the command if ``store`` names a file that does not exist."""
    parsed = database_url(store)
    if parsed.get_backend_name() == "sqlite" and not Path(str(parsed.database)).exists():
        fail(f"there is no store at {store}: start `bridle proxy`, or name one with --store")


def require_run(source: Reader, run: str | None) -> None:
    """End the command if ``run`` is named and the store has no such run."""
    if run is None:
        return
    try:
        source.run(run)
    except NotFound:
        newest = ", ".join(known.id for known in source.runs()[-_RUNS_NAMED:])
        fail(f"no run {run!r} in this store; " + (f"newest: {newest}" if newest else "it has none"))


def require_turn(session: str, turn: int, turns: int) -> None:
    """Raise :class:`NotFound` if a session with ``turns`` turns has no turn ``turn``."""
    if not turns:
        raise NotFound(f"session {session} has no turns yet")
    if not 1 <= turn <= turns:
        raise NotFound(f"session {session} has turns 1 to {turns}, not {turn}")


def nothing_found(source: Reader) -> str:
    """Return the reason why no session was found, as a message."""
    if next(source.sessions(limit=1), None) is not None:
        return "no session matches"
    return _NO_SESSION_YET


def one_session(source: Reader, wanted: str) -> SessionRecord:
    """Return the session with this id, name, or unambiguous beginning of an id.

    ``last`` is the newest session. End the command if there is no such session, or more than one.
    """
    if wanted == "last":
        newest = next(iter(source.sessions(limit=1, newest_first=True)), None)
        if newest is None:
            fail(_NO_SESSION_YET)
        return newest
    if named := source.session_by_name(wanted):
        return named
    found = [record for record in source.sessions() if record.id.startswith(wanted)]
    exact = [record for record in found if record.id == wanted]
    if exact:
        return exact[0]
    if len(found) == 1:
        return found[0]
    if found:
        fail(f"{len(found)} sessions begin with {wanted!r}: give more of the id")
    fail(f"no session {wanted!r} in this store (`bridle sessions` lists them)")
