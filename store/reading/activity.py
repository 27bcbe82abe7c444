"""Activity in a store: the calls that ended in the last seconds, and open calls and sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import bindparam, case, func, select

from bridle.store.reading.call_conditions import UNUSABLE
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus
from bridle.store.schema.columns import seconds_between
from bridle.store.schema.tables import calls, sessions


@dataclass(frozen=True, slots=True)
class Activity:
    """Counts of the calls that ended since a moment, and of open calls and sessions."""

    calls: int
    failed: int
    """Number of these calls without a usable reply."""
    sampled: int
    """Number of tokens that these calls sampled."""
    slowest_s: float
    """Seconds of the longest of these calls."""
    running: int
    """Number of calls that have begun and not ended."""
    open_sessions: int


_ENDED: Final = select(
    func.count().label("calls"),
    func.coalesce(func.sum(case((calls.c.status.in_(UNUSABLE), 1), else_=0)), 0).label("failed"),
    func.coalesce(func.sum(calls.c.sampled_tokens), 0).label("sampled"),
    func.coalesce(func.max(seconds_between(calls.c.started_at, calls.c.ended_at)), 0.0).label(
        "slowest_s"
    ),
).where(calls.c.ended_at >= bindparam("since"))
_RUNNING: Final = select(func.count()).where(calls.c.status == CallStatus.OPEN)
_OPEN: Final = select(func.count()).where(sessions.c.sealed_at.is_(None))


def activity(reader: Reader, since: float) -> Activity:
    """Return the activity since that time (seconds since the epoch)."""
    with reader.engine.connect() as connection:
        ended = connection.execute(_ENDED, {"since": since}).one()
        running = connection.execute(_RUNNING).scalar_one()
        open_sessions = connection.execute(_OPEN).scalar_one()
    return Activity(
        calls=ended.calls,
        failed=int(ended.failed),
        sampled=int(ended.sampled),
        slowest_s=float(ended.slowest_s),
        running=int(running),
        open_sessions=int(open_sessions),
    )
