"""Which sessions each consumer of the trajectory feed holds on lease or is done with.

A delivery is a row: this session was handed to this consumer, until a time, or for good once
acknowledged. Sealed sessions without a row, or with one whose time is over, are handed out next; so
every session reaches every consumer at least once, whichever of the proxies that share the store it
asks. Times are the wall clock's: proxies whose clocks differ by a second disagree on a lease's end
by that second.
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
from bridle.store.schema.database import transaction
from bridle.store.schema.tables import deliveries, rewards, sessions

SETTLE_S: Final = 1.0
"""Sessions are handed out this long after their sealing: until then one that was sealed earlier may
still be on its way into the store."""


class UnknownLease(BridleError, LookupError):
    """There is no such lease: it ran out, was acknowledged or released before."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Sessions handed to a consumer until a time."""

    id: str
    sessions: tuple[str, ...]
    """Oldest sealed first."""
    until: float


class Deliveries:
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
        rewarded: bool = False,
    ) -> Lease | None:
        """Up to ``limit`` sessions that nobody of this consumer holds, oldest sealed first.

        ``None`` when there is none. ``run`` takes only that run's sessions, ``rewarded`` only those
        that have a reward.
        """
        now = self._clock()
        free = select(sessions.c.id).where(
            sessions.c.sealed_at < now - SETTLE_S,
            ~exists().where(
                deliveries.c.session_id == sessions.c.id,
                deliveries.c.consumer == consumer,
                deliveries.c.until.is_(None) | (deliveries.c.until > now),
            ),
        )
        if run is not None:
            free = free.where(sessions.c.run_id == run)
        if rewarded:
            free = free.where(exists().where(rewards.c.session_id == sessions.c.id))
        free = free.order_by(sessions.c.sealed_at, sessions.c.id).limit(limit)
        with transaction(self._engine) as connection:
            self._in_turn(connection, consumer)
            found = tuple(connection.execute(free).scalars())
            if not found:
                return None
            lease = Lease(new_id("lease"), found, now + lease_s)
            insert = postgresql.insert if _is_postgres(connection) else sqlite.insert
            statement = insert(deliveries)
            again = statement.on_conflict_do_update(
                index_elements=[deliveries.c.consumer, deliveries.c.session_id],
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
        """The sessions that will not be delivered to this consumer again, once committed.

        Raises :class:`UnknownLease`.
        """
        with transaction(self._engine) as connection:
            self._in_turn(connection, consumer)
            held = self._held(connection, consumer, lease_id)
            done = update(deliveries).where(_of(consumer, lease_id)).values(until=None)
            connection.execute(done)
        return held

    def release(self, consumer: str, lease_id: str) -> None:
        """Gives the sessions back at once. Raises :class:`UnknownLease`."""
        with transaction(self._engine) as connection:
            self._in_turn(connection, consumer)
            self._held(connection, consumer, lease_id)
            connection.execute(delete(deliveries).where(_of(consumer, lease_id)))

    def _held(self, connection: Connection, consumer: str, lease_id: str) -> Sequence[str]:
        held = select(deliveries.c.session_id).where(
            _of(consumer, lease_id), deliveries.c.until > self._clock()
        )
        found = list(connection.execute(held.order_by(deliveries.c.session_id)).scalars())
        if not found:
            raise UnknownLease(f"lease {lease_id!r} does not exist: it expired or was given back")
        return found

    @staticmethod
    def _in_turn(connection: Connection, consumer: str) -> None:
        """One request of a consumer after the other; SQLite's transactions are so anyway."""
        if _is_postgres(connection):
            connection.exec_driver_sql(
                "SELECT pg_advisory_xact_lock(hashtextextended(%(key)s, 0))",
                {"key": f"bridle:{consumer}"},
            )


def _of(consumer: str, lease_id: str) -> ColumnElement[bool]:
    return and_(deliveries.c.consumer == consumer, deliveries.c.lease_id == lease_id)


def _is_postgres(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"
