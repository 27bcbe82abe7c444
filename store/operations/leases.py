"""Leases of sessions to the consumers of the trajectory feed.

Each row is one session that was handed to one consumer until a time, or for good once it is
acknowledged. Sealed sessions without a row, or with a row whose time is over, are handed out next.
So every session reaches every consumer at least once, whichever of the proxies that share the store
the consumer asks. Times are the wall clock's: proxies whose clocks differ by a second disagree by
that second on the end of a lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, Connection, Engine, and_, delete, exists, select, update
from sqlalchemy.dialects import postgresql, sqlite

from bridle.errors import BridleError
from bridle.store.records import new_id
from bridle.store.reward import RewardKind
from bridle.store.schema.database import transaction
from bridle.store.schema.tables import leases, rewards, sessions

SETTLE_S: Final = 1.0
"""Seconds from the sealing of a session until it is handed out. Until then a session that was
sealed earlier may still be on its way into the store."""


class UnknownLease(BridleError, LookupError):
    """The lease does not exist: it expired, was acknowledged or was released before."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Sessions handed to a consumer until a time."""

    id: str
    sessions: tuple[str, ...]
    """The ids of the sessions, oldest sealed first."""
    until: float


class Leases:
    """The consumers of one store; its methods may be called from any thread and process."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.time) -> None:
        self._engine, self._clock = engine, clock

    def lease(
        self,
        consumer: str,
        limit: int,
        lease_s: float,
        *,
        run: str | None = None,
        rewarded_by: Sequence[str] | None = None,
    ) -> Lease | None:
        """Lease up to ``limit`` sessions that this consumer does not hold, oldest sealed first.

        Return ``None`` if there are none. ``run`` takes only that run's sessions, ``rewarded_by``
        only those that have a score of one of these sources.
        """
        now = self._clock()
        free = select(sessions.c.id).where(
            sessions.c.sealed_at < now - SETTLE_S,
            ~exists().where(
                leases.c.session_id == sessions.c.id,
                leases.c.consumer == consumer,
                leases.c.until.is_(None) | (leases.c.until > now),
            ),
        )
        if run is not None:
            free = free.where(sessions.c.run_id == run)
        if rewarded_by is not None:
            own = rewards.c.session_id == sessions.c.id
            score = rewards.c.kind == RewardKind.SCORE
            free = free.where(exists().where(own, score, rewards.c.source.in_(rewarded_by)))
        free = free.order_by(sessions.c.sealed_at, sessions.c.id).limit(limit)
        with transaction(self._engine) as connection:
            self._in_turn(connection, consumer)
            found = tuple(connection.execute(free).scalars())
            if not found:
                return None
            lease = Lease(new_id("lease"), found, now + lease_s)
            insert = postgresql.insert if _is_postgres(connection) else sqlite.insert
            statement = insert(leases)
            again = statement.on_conflict_do_update(
                index_elements=[leases.c.consumer, leases.c.session_id],
                set_={
                    "lease_id": statement.excluded.lease_id,
                    "until": statement.excluded.until,
                },
            )
            rows = [
                {
                    "consumer": consumer,
                    "session_id": session_id,
                    "lease_id": lease.id,
                    "until": lease.until,
                }
                for session_id in found
            ]
            connection.execute(again, rows)
        return lease

    def acknowledge(self, consumer: str, lease_id: str) -> Sequence[str]:
        """Commit that these sessions are not handed to this consumer again, and return them.

        Raise :class:`UnknownLease`.
        """
        with transaction(self._engine) as connection:
            self._in_turn(connection, consumer)
            held = self._held(connection, consumer, lease_id)
            done = update(leases).where(_of(consumer, lease_id)).values(until=None)
            connection.execute(done)
        return held

    def release(self, consumer: str, lease_id: str) -> None:
        """Give the sessions back at once. Raise :class:`UnknownLease`."""
        with transaction(self._engine) as connection:
            self._in_turn(connection, consumer)
            self._held(connection, consumer, lease_id)
            connection.execute(delete(leases).where(_of(consumer, lease_id)))

    def _held(self, connection: Connection, consumer: str, lease_id: str) -> Sequence[str]:
        held = select(leases.c.session_id).where(
            _of(consumer, lease_id), leases.c.until > self._clock()
        )
        found = list(connection.execute(held.order_by(leases.c.session_id)).scalars())
        if not found:
            raise UnknownLease(f"lease {lease_id!r} does not exist: it expired or was given back")
        return found

    @staticmethod
    def _in_turn(connection: Connection, consumer: str) -> None:
        """Wait until no other request of the consumer runs.

        SQLite runs one transaction at a time anyway.
        """
        if _is_postgres(connection):
            connection.exec_driver_sql(
                "SELECT pg_advisory_xact_lock(hashtextextended(%(key)s, 0))",
                {"key": f"bridle:{consumer}"},
            )


def _of(consumer: str, lease_id: str) -> ColumnElement[bool]:
    return and_(leases.c.consumer == consumer, leases.c.lease_id == lease_id)


def _is_postgres(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"
