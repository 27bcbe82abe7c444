"""The states of runs. A run whose process was killed cannot record its end, but counts as lost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, func, select

from bridle.store.processes import alive
from bridle.store.reading.queries import Reader
from bridle.store.records import RunRecord
from bridle.store.schema.tables import attempts, calls, sessions, writers


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run, as a reader knows it."""

    status: str
    """The recorded status, or ``lost`` if the run is recorded as running and its process is
    gone."""
    reason: str | None = None
    seen_at: float | None = None
    """The time of the last write for a run that is recorded as running."""

    @property
    def lost(self) -> bool:
        return self.status == "lost"

    @property
    def text(self) -> str:
        """A text of the state for people."""
        if self.seen_at is None:
            return self.status if self.reason is None else f"{self.status}: {self.reason}"
        day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.seen_at))
        gone = ", its process is gone" if self.lost else ""
        return f"{self.status}{gone}: last seen {day}"


def run_state(reader: Reader, run: RunRecord) -> RunState:
    """Return the state of ``run``.

    A run that another program began through the control API has no process in the store; it is
    ``running`` until that program sets its end.
    """
    if run.status != "running":
        return RunState(run.status, run.reason)
    with reader.engine.connect() as connection:
        latest = select(attempts).where(attempts.c.run_id == run.id, attempts.c.ended_at.is_(None))
        attempt = connection.execute(latest.order_by(attempts.c.number.desc())).first()
        writer: Row[Any] | None = None
        if attempt is not None:
            own = select(writers).where(writers.c.id == attempt.writer_id)
            writer = connection.execute(own).first()
        inside = sessions.c.run_id == run.id
        began = select(func.max(sessions.c.created_at)).where(inside)
        called = select(func.max(calls.c.started_at)).join_from(calls, sessions).where(inside)
        times = [connection.execute(query).scalar() for query in (began, called)]
    seen = max([run.started_at, *(at for at in times if at is not None)])
    if writer is not None:
        seen = max(seen, writer.seen_at)
    lost = attempt is not None and (writer is None or not alive(writer))
    return RunState("lost" if lost else "running", seen_at=seen)
