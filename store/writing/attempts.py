"""Attempts of runs: their beginnings and ends, and the end of those whose process died.

A run is started several times when it is resumed. ``runs`` shows the state of its latest attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, func, insert, select, update

from bridle.store.records import AttemptBegun, AttemptEnded
from bridle.store.schema.tables import attempts, runs

_RUNNING: Final = "running"
_GOES_ON: Final = {"status": _RUNNING, "reason": None, "ended_at": None}


def begin(connection: Connection, begun: AttemptBegun, writer_id: str) -> None:
    """Add the run unless it is known, and its next attempt, and set the run to ``running``."""
    run = begun.run
    known = connection.execute(select(runs.c.id).where(runs.c.id == run.id)).first()
    if known is None:
        columns = {name: getattr(run, name) for name in run.__dataclass_fields__}
        connection.execute(insert(runs).values(columns))
    else:
        connection.execute(update(runs).where(runs.c.id == run.id).values(_GOES_ON))
    latest = select(func.max(attempts.c.number)).where(attempts.c.run_id == run.id)
    number = (connection.execute(latest).scalar() or 0) + 1
    row = {"run_id": run.id, "number": number, "writer_id": writer_id, "started_at": begun.at}
    connection.execute(insert(attempts).values(row | _GOES_ON))


def end(connection: Connection, ended: AttemptEnded, writer_id: str) -> int:
    """End a run and this writer's attempt at it. Return the number of runs with this id."""
    values = {"status": ended.status, "reason": ended.reason, "ended_at": ended.at}
    own = (attempts.c.run_id == ended.run_id) & (attempts.c.writer_id == writer_id)
    newest = select(func.max(attempts.c.number)).where(own).scalar_subquery()
    connection.execute(update(attempts).where(own, attempts.c.number == newest).values(values))
    return connection.execute(update(runs).where(runs.c.id == ended.run_id).values(values)).rowcount


def end_lost(
    connection: Connection, living: Sequence[str], seen: Mapping[str, float], reason: str
) -> None:
    """Mark the attempts of writers that are not ``living`` as failed.

    Each fails at the time at which its writer was ``seen`` last.
    """
    lost = select(attempts).where(
        attempts.c.status == _RUNNING, attempts.c.writer_id.not_in(living)
    )
    for row in connection.execute(lost).all():
        at = max(seen.get(row.writer_id, 0.0), row.started_at)
        ended = {"status": "failed", "reason": reason, "ended_at": at}
        own = (attempts.c.run_id == row.run_id) & (attempts.c.number == row.number)
        connection.execute(update(attempts).where(own).values(ended))
        _set_runs(connection, own & ~_has_later(row), ended)


def adopt(connection: Connection, old: str, new: str, reason: str) -> None:
    """Give the attempts of the writer ``old`` to the writer ``new`` of the same process.

    ``old`` was judged to be gone, for ``reason``, while it lived.
    """
    lost = (attempts.c.status == _RUNNING) | (attempts.c.reason == reason)
    own = (attempts.c.writer_id == old) & lost
    _set_runs(connection, own, _GOES_ON)
    connection.execute(update(attempts).where(own).values(_GOES_ON | {"writer_id": new}))


def _has_later(row: Any) -> ColumnElement[bool]:
    """Return the condition that the run has been started again since."""
    later = attempts.alias()
    found = select(later.c.number).where(later.c.run_id == row.run_id, later.c.number > row.number)
    return found.exists()


def _set_runs(connection: Connection, of: ColumnElement[bool], values: Mapping[str, Any]) -> None:
    """Set columns of the runs that have an attempt which meets the condition ``of``."""
    ids = select(attempts.c.run_id).where(of)
    connection.execute(update(runs).where(runs.c.id.in_(ids)).values(dict(values)))
