"""The queue between callers and the writing thread: jobs of records, and their waiters.

The writing thread takes all jobs that have gathered at once (group commit), and their waiters are
notified when the transaction is over. Nothing waits for the beginning of a call or of a session, so
it stays in the queue for a moment. If the call ends meanwhile, its beginning is taken with its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from bridle.store.errors import StoreBusy, StoreClosed, StoreUnavailable
from bridle.store.writing.batch import Record

log = logging.getLogger("bridle.store")

_MAX_BATCH: Final = 2048
"""Maximum jobs taken at once: enough to fill a transaction, few enough that nobody waits for
seconds."""

_GATHER_S: Final = 0.05
"""Maximum seconds until a beginning, for which nothing waits, is written. A call that is over
sooner is written once and not twice, and the writing thread does not run beside its start."""

_AWAKE_S: Final = 1.0
"""Seconds after its last work during which the taker polls for beginnings. If each beginning woke
it instead, a busy process would pay a change of threads per call."""


@dataclass(slots=True, eq=False)
class WriteJob:
    records: Sequence[Record]
    """The records of the job, which are committed together or not at all."""
    done: asyncio.Future[None] | Future[None] | None = None
    due: float = math.inf
    """The time, of ``time.monotonic()``, until which the job waits for a store that is busy or
    away."""


@dataclass(slots=True)
class WriteResult:
    job: WriteJob
    error: StoreUnavailable | None = None


class JobQueue:
    """A bounded queue with one taker. It refuses jobs until it is opened and after it is closed."""

    def __init__(self, limit: int, patience: float) -> None:
        """Make a closed queue.

        ``patience`` is the seconds for which a job may wait in all for a store that is busy or
        away.
        """
        self._limit = limit
        self._patience = patience
        self._jobs: deque[WriteJob] = deque()
        """The jobs in the order in which they are written."""
        self._early: dict[str, tuple[float, WriteJob]] = {}
        """Beginnings by the id of the call or session that begins, oldest first, each with the time
        until which it may wait."""
        self._lock = threading.Lock()
        self._bell: SimpleQueue[None] = SimpleQueue()
        """The signal that wakes the taker."""
        self._open = False
        self._asleep = False
        """True if the taker waits for a signal, or for a beginning to be due."""
        self._dozing = False
        """True if it waits for a signal alone, because there is nothing to take, now or soon."""
        self._awake_until = 0.0

    def __len__(self) -> int:
        return len(self._jobs) + len(self._early)

    @property
    def is_open(self) -> bool:
        return self._open

    def open(self) -> None:
        self._open = True

    def close(self) -> bool:
        """Refuse further jobs, and return whether the queue was open.

        Queued jobs can still be taken.
        """
        with self._lock:
            was_open, self._open = self._open, False
            if self._asleep:
                self._ring()
        return was_open

    def put_beginning(self, name: str, job: WriteJob) -> None:
        """Queue a job that nothing waits for.

        It is written before the first job that follows ``name``, or alone if none comes soon.

        Raise as :meth:`put` does.
        """
        with self._lock:
            self._admit(refuse=True)
            now = time.monotonic()
            job.due = now + self._patience
            self._early[name] = (now + _GATHER_S, job)
            if self._dozing:
                self._ring()

    def put(
        self, job: WriteJob, *, refuse: bool = True, follows: tuple[str, ...] | None = None
    ) -> None:
        """Queue a job that somebody waits for, behind the beginnings that it ``follows``.

        The beginnings are queued in this order. A job with ``None`` may need any of them, and
        follows all.

        Raise :class:`StoreClosed`, and :class:`StoreBusy` if the queue is full and the job may be
        refused.
        """
        with self._lock:
            self._admit(refuse)
            job.due = time.monotonic() + self._patience
            if self._asleep:
                self._ring()
            if follows is None:
                self._jobs.extend(early for _, early in self._early.values())
                self._early.clear()
            else:
                for name in follows:
                    if (early := self._early.pop(name, None)) is not None:
                        self._jobs.append(early[1])
            self._jobs.append(job)

    def take(self, until: float) -> list[WriteJob]:
        """Wait for jobs and return those to write now.

        Return none at ``until`` (of the monotonic clock), and none once the queue is closed and
        empty.
        """
        while True:
            with self._lock:
                self._asleep = self._dozing = False
                now = time.monotonic()
                next_early = self._release(now)
                if self._jobs or now >= until or not self._open:
                    if self._jobs:
                        self._awake_until = now + _AWAKE_S
                    count = min(len(self._jobs), _MAX_BATCH)
                    return [self._jobs.popleft() for _ in range(count)]
                if next_early is None and now < self._awake_until:
                    next_early = now + _GATHER_S
                self._asleep, self._dozing = True, next_early is None
            with contextlib.suppress(Empty):
                self._bell.get(timeout=min(until, next_early or until) - now)

    def _ring(self) -> None:
        """Signal the taker, once for each time that it waits.

        Signals for which nobody waits would gather while there is work.
        """
        self._asleep = self._dozing = False
        self._bell.put(None)

    def _admit(self, refuse: bool) -> None:
        if not self._open:
            raise StoreClosed("the store's writer is not running")
        if refuse and len(self) >= self._limit:
            raise StoreBusy(f"{len(self)} records wait to be written")

    def _release(self, now: float) -> float | None:
        """Queue the beginnings that are due.

        Return the time at which the next one will be, or ``None``.
        """
        while self._early:
            name, (due, job) = next(iter(self._early.items()))
            if due > now and self._open:
                return due
            del self._early[name]
            self._jobs.append(job)
        return None


def deliver(outcomes: Sequence[WriteResult]) -> None:
    """Notify the waiters: threads one by one, each event loop once for all of its own."""
    by_loop: dict[asyncio.AbstractEventLoop, list[WriteResult]] = {}
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


def _settle_all(outcomes: Sequence[WriteResult]) -> None:
    for outcome in outcomes:
        if outcome.job.done is not None and not outcome.job.done.done():
            _settle(outcome.job.done, outcome.error)


def _settle(done: asyncio.Future[None] | Future[None], error: StoreUnavailable | None) -> None:
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
