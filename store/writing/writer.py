"""The one writer of a process: a thread that writes all queued records in one transaction.

Callers queue records and wait for the commit. While one transaction is written the next batch
gathers, so that the disk is waited for once per batch and not once per call (group commit).

- The beginning of a call, for which nobody waits, stays queued for a moment: a call that is over by
  then is written in one piece (``store/writing/job_queue.py``).
- A call's end may always be queued, because there are never more ends than admitted calls.
  Everything else is refused with ``StoreBusy`` when ``queue_limit`` records wait.
- A record that the database refuses fails alone: its batch is written again one by one.
- A locked database or a lost connection is tried again, for each record until ``patience`` seconds
  after it was queued. No record waits for the end of another's patience.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

from sqlalchemy import Connection, select
from sqlalchemy.exc import (
    DBAPIError,
    InterfaceError,
    InternalError,
    OperationalError,
    StatementError,
)

from bridle.store.call import CallBegun, CallEnded
from bridle.store.clock import Stopwatch
from bridle.store.errors import RecordRejected, StoreUnavailable
from bridle.store.records import (
    AttemptBegun,
    AttemptEnded,
    CallKind,
    Metric,
    Note,
    RunRecord,
)
from bridle.store.schema.database import Synchronous, connect, file_id, make_whole, transaction
from bridle.store.schema.tables import sessions, writers
from bridle.store.writing import liveness
from bridle.store.writing.batch import Batch, Patch, Record
from bridle.store.writing.cache import SessionCache
from bridle.store.writing.digest import Digester, lacking
from bridle.store.writing.job_queue import JobQueue, WriteJob, WriteResult, deliver
from bridle.store.writing.redaction import Redactor
from bridle.store.writing.rows import statements

log = logging.getLogger("bridle.store")

LEASE_S: Final = 30.0
"""Seconds for which a process counts as alive after it has renewed its lease."""
_BUSY_S = 0.5
"""Seconds for which SQLite itself waits for another process's transaction. The writer tries again,
and must check the time meanwhile."""

_QUIET_S = 1.0
"""Seconds without a write until the content of SQLite's log is moved into the file."""

_REST = 3.0
"""The multiple of the time of a digest's step for which the next one waits, so that digests take a
quarter of a core at most."""

_DISK_FULL = "53100"
"""PostgreSQL's SQLSTATE for a full disk."""

_DATABASES_FAULT = (OperationalError, InterfaceError, InternalError)
"""Errors for which no record is to blame. A read-only PostgreSQL server raises internal errors, as
does one that a failover has not reached yet."""


@dataclass(slots=True)
class WriterStats:
    """Counters since the start of the writer."""

    transactions: int = 0
    """Number of committed transactions that carried records."""
    rejected: int = 0
    """Number of jobs (records that are added together) that the database refused."""
    failed: int = 0
    """Number of jobs lost because the database could not be written."""
    retries: int = 0
    """Number of times that a transaction was tried again."""
    interrupted: int = 0
    """Number of open calls found whose process had died."""


class Writer:
    """The writer of records to ``url``; see the module for its rules.

    Start it, or use it as a context manager.

    The schema must be current (:func:`bridle.store.schema.database.migrate`). A ``redactor``
    removes secrets from calls before they are written.

    Methods that are ``async`` return after the commit; those ending in ``_sync``, and those for
    runs and metrics, block until then and are for threads without an event loop. All raise
    :class:`StoreUnavailable` if the record is not in the store. Cancelling a wait does not cancel
    the write.
    """

    def __init__(
        self,
        url: str,
        *,
        synchronous: Synchronous = "NORMAL",
        queue_limit: int = 20_000,
        patience: float = 30.0,
        lease: float = LEASE_S,
        cache_bytes: int = 32 << 20,
        redactor: Redactor | None = None,
    ) -> None:
        self.stats = WriterStats()
        self._engine = connect(
            url, synchronous=synchronous, page_cache_kib=8192, busy_timeout_s=_BUSY_S, writes=True
        )
        self.well = True
        """True if the last attempt to write to the store succeeded."""
        self._connection: Connection | None = None
        self._remote = self._engine.dialect.name != "sqlite"
        self._file: tuple[int, int] | None = None
        self._lease = lease
        self._cache = SessionCache(cache_bytes)
        self._redactor = redactor
        self._lost: set[str] = set()
        """The calls whose ends could not be written. The tokens of calls that hang on theirs are
        stored whole."""
        self._queue = JobQueue(queue_limit, patience)
        self._digester = Digester()
        self._begun: dict[str, Stopwatch] = {}
        """The times of the attempts that run, by run."""
        self._number = 0
        self._writer_id = ""
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)

    def start(self) -> Self:
        """Register this process, interrupt dead ones' calls and attempts, and start to write."""
        with transaction(self._engine) as connection:
            self._writer_id = liveness.register(connection, self._lease)
        self._file = file_id(self._engine)
        self.mark_interrupted()
        with self._engine.connect() as connection:
            self._digester.add(lacking(connection))
        self._queue.open()
        self._thread.start()
        return self

    def close(self) -> None:
        """Write everything that is queued, interrupt the calls that are still open, and stop."""
        if not self._queue.close():
            return
        self._thread.join()
        if self._connection is not None:
            self._connection.close()
        try:
            with transaction(self._engine) as connection:
                liveness.retire(connection, self._writer_id)
        except DBAPIError as error:
            log.warning("store_retire_failed: %s", error.orig)
        self._make_whole(wait=True)
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def id(self) -> str:
        """The identifier of this process's row in ``writers``. It changes if the lease expired."""
        return self._writer_id

    @property
    def waiting(self) -> int:
        """Number of jobs that are queued and not yet in a transaction."""
        return len(self._queue)

    @property
    def digesting(self) -> int:
        """Number of sealed sessions whose derived rows this process has yet to make."""
        return len(self._digester)

    def mark_interrupted(self) -> int:
        """Mark calls that died with their process as interrupted. Return the number of these calls.

        This is done at the start and with every renewal of the lease. Calls of other living
        processes are not changed (``store/writing/liveness.py``).
        """
        with transaction(self._engine) as connection:
            found = liveness.interrupt_orphans(connection)
        self.stats.interrupted += found
        return found

    async def add(self, *records: Record) -> None:
        """Add records in one transaction.

        Tasks, policies and metrics replace earlier rows of the same key. Raise
        :class:`RecordRejected` if one of the records cannot be stored, such as a session whose id,
        name or key is taken.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(WriteJob(records, done))
        await done

    def add_sync(self, *records: Record) -> None:
        """Add records as :meth:`add` does, for a thread."""
        if not records:
            return
        done: Future[None] = Future()
        self._queue.put(WriteJob(records, done))
        done.result()

    # -- calls -----------------------------------------------------------------------------------

    def begin_call(self, begun: CallBegun) -> None:
        """Queue the beginning of a call. Raise :class:`StoreBusy` if the queue is full."""
        self._queue.put_beginning(begun.id, WriteJob((begun,)))

    def end_call(self, ended: CallEnded) -> asyncio.Future[None]:
        """Queue the end of a call.

        Return a future that is done once the call is committed, so that its client may see the
        terminal event. The future raises :class:`StoreUnavailable` otherwise, and
        :class:`RecordRejected` if this call is at fault.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(WriteJob((ended,), done), refuse=False, follows=_beginnings(ended))
        return done

    def end_call_sync(self, ended: CallEnded) -> None:
        """Record the end of a call as :meth:`end_call` does, for a thread."""
        done: Future[None] = Future()
        self._queue.put(WriteJob((ended,), done), refuse=False, follows=_beginnings(ended))
        done.result()

    async def set_kind(
        self, call_id: str, kind: CallKind | None, role: str | None = None, *, by: str
    ) -> None:
        """Set the kind that a person decided for a call.

        It takes precedence over everything recorded. ``None`` removes the decision. Raise
        :class:`RecordRejected` for an unknown call.
        """
        await self.add(_kind_patch(call_id, kind, role, by))

    def set_kind_sync(
        self, call_id: str, kind: CallKind | None, role: str | None = None, *, by: str
    ) -> None:
        """Set the kind of a call as :meth:`set_kind` does, for a thread."""
        self.add_sync(_kind_patch(call_id, kind, role, by))

    async def set_notes(self, call_id: str, notes: Sequence[Note]) -> None:
        """Set the notes on a call. Raise :class:`RecordRejected` for an unknown call."""
        await self.add(Patch("calls", call_id, {"notes": _plain(notes)}))

    async def seal_session(
        self, session_id: str, outcome: str, at: float, fields: Mapping[str, Any] | None = None
    ) -> None:
        """Seal a session, and set further columns of it to ``fields``.

        A session that is sealed already is not changed.
        """
        sealed = {**(fields or {}), "sealed_at": at, "outcome": outcome}
        await self.add(Patch("sessions", session_id, sealed, once="sealed_at"))

    async def set_verifier_key(self, session_id: str, key_hash: str) -> None:
        """Replace the hash of the key that scores a session."""
        await self.add(Patch("sessions", session_id, {"verifier_key_hash": key_hash}))

    def update_session_sync(self, session_id: str, **fields: Any) -> None:
        """Set columns of a session, such as ``labels``; for a thread."""
        self.add_sync(_session_patch(session_id, fields))

    # -- runs, for threads ----------------------------------------------------------------------

    def configure_run(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Replace the stored configuration and state of a run."""
        self.add_sync(Patch("runs", run_id, {"config": dict(config)}))

    def begin_run(self, *begun: RunRecord) -> None:
        """Start runs, for the first time or again.

        Each is running until :meth:`finish_run`, and has failed if this process dies before.
        """
        watch = Stopwatch()
        self._begun.update({run.id: watch for run in begun})
        self.add_sync(*(AttemptBegun(run, watch.started_at) for run in begun))

    def finish_run(
        self, run_id: str, status: str, ended_at: float | None = None, reason: str | None = None
    ) -> None:
        """Record the end of a run: its status, and a line that gives the reason.

        The status is ``completed``, ``failed`` or ``stopped``.
        """
        watch = self._begun.pop(run_id, None)
        now = time.time() if watch is None else watch.now()
        at = now if ended_at is None else ended_at
        self.add_sync(AttemptEnded(run_id, status, at, reason))

    def record_metrics(
        self, run_id: str, step: int, values: Mapping[str, float], at: float | None = None
    ) -> None:
        """Add a step's numbers in one transaction.

        A later value of the same name replaces the earlier one.
        """
        now = time.time() if at is None else at
        self.add_sync(*(Metric(run_id, step, name, float(v), now) for name, v in values.items()))

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        beat = time.monotonic() + self._lease / 3
        quiet = math.inf
        """The time at which the log is moved into the file, unless more is written before."""
        rested = 0.0
        """The time from which the next step of a digest may be taken."""
        while True:
            jobs = self._queue.take(min(beat, quiet, rested if self._digester else math.inf))
            if jobs:
                quiet = time.monotonic() + _QUIET_S
                if self._redactor is not None:
                    jobs = self._scrubbed(self._redactor, jobs)
                deliver(self._write(jobs))
            elif not self._queue.is_open and not len(self._queue):  # in this order
                return
            if self._digester and not len(self._queue) and time.monotonic() >= rested:
                rested = self._digest()
                quiet = time.monotonic() + _QUIET_S
            if time.monotonic() >= quiet:
                self._make_whole(wait=False)
                quiet = math.inf
            if time.monotonic() >= beat:
                self._renew()
                beat = time.monotonic() + self._lease / 3

    def _scrubbed(self, redactor: Redactor, jobs: Sequence[WriteJob]) -> list[WriteJob]:
        """Return the jobs without secrets.

        Reject those whose records cannot be redacted; they are not written.
        """
        kept: list[WriteJob] = []
        for job in jobs:
            try:
                job.records = [redactor.scrubbed(record) for record in job.records]
            except Exception as error:  # noqa: BLE001 - the thread writes for all calls
                rejected = RecordRejected(f"the record cannot be redacted: {_cause(error)}")
                deliver([self._reject(job, rejected)])
            else:
                kept.append(job)
        return kept

    def _make_whole(self, *, wait: bool) -> None:
        # The log beside a file that was moved or replaced belongs to the one that was moved.
        if file_id(self._engine) == self._file:
            make_whole(self._engine, wait=wait)

    def _renew(self) -> None:
        try:
            with transaction(self._engine) as connection:
                self._sign(connection)
            self.mark_interrupted()
            self.well = True
        except DBAPIError as error:
            self.well = False
            log.warning("store_lease_not_renewed: %s", error.orig)

    def _write(self, jobs: Sequence[WriteJob]) -> list[WriteResult]:
        waiting = list(jobs)
        try:
            self._attempt(waiting)
            return [WriteResult(job) for job in waiting]
        except StoreUnavailable as error:
            if not isinstance(error, RecordRejected):
                return self._give_up(waiting, error)
            if len(waiting) == 1:
                return [self._reject(waiting[0], error)]
        return [outcome for job in waiting for outcome in self._write([job])]

    def _give_up(self, jobs: Sequence[WriteJob], error: StoreUnavailable) -> list[WriteResult]:
        self.well = False
        self.stats.failed += len(jobs)
        self._lose(jobs)
        return [WriteResult(job, error) for job in jobs]

    def _reject(self, job: WriteJob, error: StoreUnavailable) -> WriteResult:
        self.stats.rejected += 1
        self._lose([job])
        log.error("store_record_rejected: %s: %s", type(job.records[0]).__name__, error)
        return WriteResult(job, error)

    def _lose(self, jobs: Sequence[WriteJob]) -> None:
        ended = (record for job in jobs for record in job.records if isinstance(record, CallEnded))
        self._lost.update(record.id for record in ended)

    def _attempt(self, jobs: list[WriteJob]) -> None:
        """Commit the jobs in one transaction, waiting for a database that is busy or away.

        Jobs whose patience ends meanwhile are given up, and removed from ``jobs``.

        Raise :class:`RecordRejected` if a record is at fault, else :class:`StoreUnavailable`.
        """
        pause, again = 0.01, False
        self._number += 1
        while jobs:
            try:
                self._write_once(jobs, again)
                self.well = True
                return
            except _DATABASES_FAULT as error:
                if self._committed():
                    return
                failure = StoreUnavailable(f"the store cannot be written: {error.orig}")
                if not _may_pass(error):
                    raise failure from error
                self.well = False
                now = time.monotonic()
                if late := [job for job in jobs if job.due <= now]:
                    jobs[:] = [job for job in jobs if job.due > now]
                    deliver(self._give_up(late, failure))
                self.stats.retries += 1
                again = True
                next_due = min((job.due for job in jobs), default=now)
                time.sleep(max(0.0, min(pause, next_due - now)))
                pause = min(1.0, pause * 2)

    def _digest(self) -> float:
        """Make some derived rows. Return the time from which more of them may be made."""
        start = time.monotonic()
        if file_id(self._engine) != self._file:
            return start + self._lease
        try:
            with self._transaction() as connection:
                settle = self._digester.step(connection)
            settle()
        except _DATABASES_FAULT as error:
            self._digester.failed(at_fault=False)
            log.warning("sessions_not_digested: %s", error.orig)
            is_locked = not self._remote and _may_pass(error)
            return time.monotonic() + (_QUIET_S if is_locked else self._lease)
        except Exception as error:  # noqa: BLE001 - the thread writes for all calls
            self._digester.failed(at_fault=True)
            log.warning("session_not_digested: %s", _cause(error))
        now = time.monotonic()
        return now + _REST * (now - start)

    def _write_once(self, jobs: Sequence[WriteJob], again: bool) -> None:
        """Write the jobs in one transaction.

        ``again`` means that an earlier attempt may have been committed although the server could
        not confirm it.
        """
        if file_id(self._engine) != self._file:
            file = self._engine.url.database
            cause = (
                f"the store's file was moved or replaced; what is not in it yet is in {file}-wal"
            )
            raise StoreUnavailable(cause)
        batch = Batch(partial(self._transaction, writes=False), self._cache, self._lost)
        try:
            for job in jobs:
                for record in job.records:
                    batch.add(record)
            with self._transaction() as connection:
                if self._remote:
                    if again and self._is_noted(connection):
                        batch.undo()
                        return
                    self._sign(connection)
                batch.write(connection, self._writer_id)
        except _DATABASES_FAULT:
            batch.undo()
            raise
        except Exception as error:
            batch.undo()
            raise RecordRejected(_cause(error)) from error
        batch.settle()
        self._digester.changed(batch.changed)
        self._digester.add([*batch.sealed, *(batch.changed if batch.resummed else ())])
        self.stats.transactions += 1

    def _sign(self, connection: Connection) -> None:
        """Renew the lease and number the transaction, which :meth:`_committed` looks up."""
        renew = statements(connection.dialect.name).renew
        values = (time.time(), self._number)
        if renew.run(connection, [(*values, self._writer_id)]) == 0:
            self._writer_id = liveness.register(connection, self._lease, self._writer_id)
            renew.run(connection, [(*values, self._writer_id)])

    @contextmanager
    def _transaction(self, *, writes: bool = True) -> Iterator[Connection]:
        """Open a transaction on the thread's own connection, which is closed after any failure.

        A server's connection is shared with the other writers of this process.
        """
        if self._remote:
            with transaction(self._engine) as shared:
                yield shared
            return
        connection = self._connection
        if connection is None:
            connection = self._engine.connect()
        self._connection = None
        try:
            connection.execution_options(immediate=writes)
            with connection.begin():
                yield connection
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _committed(self) -> bool:
        """Return whether the last transaction is in the database.

        Its commit was not confirmed: a server's answer can be lost on its way.
        """
        if not self._remote:
            return False
        try:
            with self._engine.connect() as connection:
                return self._is_noted(connection)
        except DBAPIError:
            return False

    def _is_noted(self, connection: Connection) -> bool:
        """Return whether the server has committed the transaction of the latest number.

        Wait for one that is being committed.
        """
        query = select(writers.c.batch).where(writers.c.id == self._writer_id).with_for_update()
        return connection.execute(query).scalar() == self._number


def _beginnings(ended: CallEnded) -> tuple[str, ...]:
    """Return the names of the beginnings that must be in the store before the call's end."""
    return ended.session_id, ended.id


def _plain(notes: Sequence[Note]) -> list[dict[str, str]]:
    return [{"name": note.name, "detail": note.detail} for note in notes]


def _session_patch(session_id: str, fields: Mapping[str, Any]) -> Patch:
    unknown = sorted(fields.keys() - sessions.c.keys())
    if unknown:
        raise TypeError(f"sessions have no {', '.join(unknown)}")
    return Patch("sessions", session_id, fields)


def _kind_patch(call_id: str, kind: CallKind | None, role: str | None, by: str) -> Patch:
    if kind is None:
        return Patch("calls", call_id, {"kind_set": None, "role_set": None, "kind_by": None})
    return Patch("calls", call_id, {"kind_set": kind.value, "role_set": role, "kind_by": by})


def _may_pass(error: DBAPIError) -> bool:
    """Return whether trying again can help.

    It can with a lock, a deadlock or a lost server, but not with a full disk.
    """
    text = str(error.orig)
    if isinstance(error.orig, sqlite3.Error):
        return "locked" in text or "busy" in text
    return getattr(error.orig, "sqlstate", None) != _DISK_FULL


def _cause(error: Exception) -> str:
    # Without the statement: its parameters are nobody else's business.
    if isinstance(error, StatementError):
        return str(error.orig)
    return f"{type(error).__name__}: {error}"
