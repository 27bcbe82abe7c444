"""What waits to be written: records queued from any thread or event loop, and who waits for them.

Group commit needs both ends: the writing thread takes all that has gathered at once, and everybody
who waits for one of these records is told when the transaction is over.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from store.batch import Record
from store.errors import StoreBusy, StoreClosed, StoreUnavailable

log = logging.getLogger("bridle.store")

_MAX_BATCH: Final = 2048
"""Jobs taken at once: enough to fill a transaction, few enough that nobody waits for seconds."""

_GATHER_S: Final = 0.02
"""The longest that records nobody waits for lie before they are taken."""


@dataclass(slots=True, eq=False)
class Job:
    records: Sequence[Record]
    """Committed together or not at all."""
    done: asyncio.Future[None] | Future[None] | None = None


@dataclass(slots=True)
class Outcome:
    job: Job
    error: StoreUnavailable | None = None


class JobQueue:
    """A bounded queue with one taker; it refuses jobs until it is opened and after it is closed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: deque[Job] = deque()
        self._wake = threading.Condition()
        self._open = False
        self._dozing = False
        """The taker sleeps until it is woken: nothing was queued for a while."""
        self._pressing = False
        """Somebody waits for a job in the queue."""

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_open(self) -> bool:
        return self._open

    def open(self) -> None:
        self._open = True

    def close(self) -> bool:
        """Takes no more jobs; whether it was open. What is queued can still be taken."""
        with self._wake:
            was_open, self._open = self._open, False
            self._wake.notify()
        return was_open

    def put(self, job: Job, refuse: bool = True) -> None:
        """Raises :class:`StoreClosed`, and :class:`StoreBusy` when the queue is full and the job
        may be refused."""
        with self._wake:
            if not self._open:
                raise StoreClosed("the store's writer is not running")
            if refuse and len(self._jobs) >= self._limit:
                raise StoreBusy(f"{len(self._jobs)} records wait to be written")
            self._jobs.append(job)
            if self._dozing or (job.done is not None and not self._pressing):
                self._wake.notify()
            self._pressing = self._pressing or job.done is not None

    def take(self, until: float) -> list[Job]:
        """What is queued, as soon as somebody waits for it or it has lain for a moment; empty at
        ``until`` (of the monotonic clock) or when closed."""
        with self._wake:
            self._gather()
            while not self._jobs and self._open:
                left = until - time.monotonic()
                if left <= 0:
                    return []
                self._dozing = True
                self._wake.wait(left)
                self._dozing = False
                self._gather()
            count = min(len(self._jobs), _MAX_BATCH)
            jobs = [self._jobs.popleft() for _ in range(count)]
            self._pressing = bool(self._jobs)
            return jobs

    def _gather(self) -> None:
        if self._open and not self._pressing:
            self._wake.wait(_GATHER_S)


def deliver(outcomes: Sequence[Outcome]) -> None:
    """Tells the waiters: threads one by one, each event loop once for all of its own."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        done = outcome.job.done
        if isinstance(done, Future):
            _settle(done, outcome.error)
        elif done is not None:
            by_loop.setdefault(done.get_loop(), []).append(outcome)
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle_all, own)
        except RuntimeError:
            log.warning("store_waiters_gone: %d records committed for a closed loop", len(own))


def _settle_all(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.job.done is not None and not outcome.job.done.done():
            _settle(outcome.job.done, outcome.error)


def _settle(done: asyncio.Future[None] | Future[None], error: StoreUnavailable | None) -> None:
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
