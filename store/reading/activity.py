"""What happens in a store at this moment: calls of the last seconds, and what runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import bindparam, case, func, select

from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus
from bridle.store.schema.tables import calls, sessions


@dataclass(frozen=True, slots=True)
class Activity:
    """Counts over the calls that ended since a moment, and of what is under way."""

    calls: int
    failed: int
    """Of them, those without a usable reply."""
    sampled: int
    """Their sampled tokens."""
    slowest_s: float
    """Seconds of the longest of them."""
    running: int
    """Calls that have begun and not ended."""
    open_sessions: int


_UNUSABLE: Final = (CallStatus.FAILED, CallStatus.QUARANTINED, CallStatus.INTERRUPTED)
_ENDED: Final = select(
    func.count().label("calls"),
    func.coalesce(func.sum(case((calls.c.status.in_(_UNUSABLE), 1), else_=0)), 0).label("failed"),
    func.coalesce(func.sum(calls.c.sampled_tokens), 0).label("sampled"),
    func.coalesce(func.max(calls.c.ended_at - calls.c.started_at), 0.0).label("slowest_s"),
).where(calls.c.ended_at >= bindparam("since"))
_RUNNING: Final = select(func.count()).where(calls.c.status == CallStatus.OPEN)
_OPEN: Final = select(func.count()).where(sessions.c.sealed_at.is_(None))


def activity(reader: Reader, since: float) -> Activity:
    """The activity since that time."""
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
