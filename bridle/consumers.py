"""Who reads the trajectory feed, how far they have come, and what they hold on lease.

Every sealed session is delivered to each consumer at least once: it is handed out on a lease, comes
back when the lease runs out or is released, and is gone only when acknowledged. What was
acknowledged is kept in the store, as the ``config`` of the consumer's run (kind ``feed``); leases
are not, so that a restarted proxy hands out again what nobody acknowledged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from store.errors import NotFound
from store.queries import Reader
from store.records import RunRecord, SessionRecord, new_id
from store.writer import Writer

SETTLE_S: Final = 1.0
"""Sessions are handed out this long after their sealing: until then one that was sealed earlier may
still be on its way into the store."""


class UnknownLease(KeyError):
    """There is no such lease: it ran out, was acknowledged or released before."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Sessions handed to a consumer until a time (monotonic seconds)."""

    id: str
    sessions: tuple[str, ...]
    until: float


@dataclass(slots=True)
class _Consumer:
    run_id: str
    position: tuple[float, str] | None
    """``(sealed_at, id)``: every session up to here is acknowledged."""
    done: set[str]
    """Acknowledged beyond the position."""
    leases: dict[str, Lease] = field(default_factory=dict)


class Consumers:
    """The consumers of one proxy; its methods may be called from any thread."""

    def __init__(
        self, reader: Reader, writer: Writer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reader, self._writer, self._clock = reader, writer, clock
        self._known: dict[str, _Consumer] = {}
        self._lock = threading.Lock()

    def lease(
        self,
        name: str,
        limit: int,
        lease_s: float,
        wanted: Callable[[SessionRecord], bool] = lambda _: True,
    ) -> tuple[Lease | None, list[SessionRecord]]:
        """Up to ``limit`` sessions that nobody holds and that are ``wanted``, oldest sealed first;
        no lease when there is none."""
        with self._lock:
            consumer = self._consumer(name)
            now = self._clock()
            live = {key: held for key, held in consumer.leases.items() if held.until > now}
            consumer.leases = live
            held = {session for lease in live.values() for session in lease.sessions}
            found: list[SessionRecord] = []
            for session in self._after(consumer):
                if len(found) == limit:
                    break
                if session.id not in held and session.id not in consumer.done and wanted(session):
                    found.append(session)
            if not found:
                return None, []
            lease = Lease(new_id("lease"), tuple(s.id for s in found), now + lease_s)
            consumer.leases[lease.id] = lease
            return lease, found

    def acknowledge(self, name: str, lease_id: str) -> Sequence[str]:
        """The sessions that will not be delivered to this consumer again, once committed.

        Raises :class:`UnknownLease`.
        """
        with self._lock:
            consumer = self._consumer(name)
            lease = self._take(consumer, lease_id)
            consumer.done.update(lease.sessions)
            for session in self._after(consumer):
                if session.id not in consumer.done or session.sealed_at is None:
                    break
                consumer.done.discard(session.id)
                consumer.position = (session.sealed_at, session.id)
            state = {"position": consumer.position, "done": sorted(consumer.done)}
            self._writer.configure_run(consumer.run_id, state)
            return lease.sessions

    def release(self, name: str, lease_id: str) -> None:
        """Gives the sessions back at once. Raises :class:`UnknownLease`."""
        with self._lock:
            self._take(self._consumer(name), lease_id)

    def _take(self, consumer: _Consumer, lease_id: str) -> Lease:
        lease = consumer.leases.pop(lease_id, None)
        if lease is None or lease.until <= self._clock():
            raise UnknownLease(lease_id)
        return lease

    def _after(self, consumer: _Consumer) -> Sequence[SessionRecord]:
        until = time.time() - SETTLE_S
        return list(self._reader.sealed_sessions(consumer.position, until=until))

    def _consumer(self, name: str) -> _Consumer:
        if name not in self._known:
            run_id = f"feed:{name}"
            try:
                state = self._reader.run(run_id).config
            except NotFound:
                state = {}
                self._writer.create_run(RunRecord(run_id, "feed", time.time(), name=name))
            position = state.get("position")
            self._known[name] = _Consumer(
                run_id,
                None if position is None else (position[0], position[1]),
                set(state.get("done", ())),
            )
        return self._known[name]
