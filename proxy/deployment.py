"""The gates and engines of the deployment, as their rows in the store have them.

Policy versions, pauses and engines are rows (``store/operations/gates.py``). A change writes the
rows; every process reads them every 50 ms and sets its gates and pools by them. No process asks
another for anything.

After a change has returned, no call starts in any process by the rows before it. A gate lets no
call pass on what was read more than :data:`FRESH_S` seconds ago, and the change returns once all
live processes have read it (each notes in its own row what it has read), or after that time. What
is promised for calls needs only the clocks to run. The notes bring the calls along that run
meanwhile, whose further tokens have the new version.

A process without calls rests if its store is on a server. It closes its gates, notes that, and
reads the rows every :data:`REST_S` seconds only. Nobody waits for a process that rests: its next
call finds the gates closed, and passes after the process has noted that it works, and then has read
the rows. So a change either sees that note, or is seen by that read.

Engines are chosen, and found healthy or not, by each process alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from bridle.proxy.engines.addresses import EngineAddress
from bridle.proxy.engines.pool import EnginePool, Policy
from bridle.proxy.grouped import Grouped
from bridle.proxy.periodic import Periodic
from bridle.proxy.session.registry import store_unavailable
from bridle.proxy.settings import ProxySettings, engine_base
from bridle.store.errors import NotFound, StoreUnavailable
from bridle.store.operations.gates import REST_S, RESTING, Gates, Member, Rows
from bridle.store.reading.queries import Reader
from bridle.store.records import DEFAULT_POLICY
from bridle.store.writing.writer import Writer

log = logging.getLogger("bridle.proxy")

FRESH_S: Final = 1.0
"""Seconds for which a call may start by what was read."""
_EVERY_S: Final = 0.05
"""Seconds between two reads of the rows."""
_LOOK_S: Final = 0.02
"""Seconds between two reads of what the other processes have noted."""
_REPORT_S: Final = 1.0
"""Seconds after which a process notes its running calls again, if nothing waits for them."""
_RETRY_S: Final = 0.1
_RESTING: Final[Mapping[bool, Mapping[str, bool]]] = {True: {RESTING: True}, False: {}}
"""The part of a note that says whether the process rests."""
_IDLE_S: Final = 2.0
"""Seconds without calls after which a process rests."""

Result = TypeVar("Result")


class GateState(msgspec.Struct, frozen=True):
    """The state of the gates, with the running and waiting calls of all processes."""

    version: int
    """The default policy's version; ``model`` is its model."""
    model: str | None
    paused: bool
    running: int
    """Number of running calls over all policies; ``waiting`` likewise. Those of another process are
    as it noted them within the last second."""
    waiting: int
    policies: dict[str, int]
    """The versions of the further policies, by name."""


class Deployment:
    """The part of this process in its deployment. Start it after the pools."""

    def __init__(
        self,
        settings: ProxySettings,
        pools: Mapping[str, EnginePool],
        writer: Writer,
        reader: Reader,
    ) -> None:
        """``pools`` holds the engines of each policy, by the policy's name."""
        self._pools = pools
        self._engines = pools[DEFAULT_POLICY]
        self._writer = writer
        self._store = Gates(reader.engine, settings.deployment)
        self._named = {DEFAULT_POLICY: settings.engine_urls, **settings.policies}
        self._patience_s = settings.limits.store_patience_s
        self._rows = Rows(0, {}, {})
        """The rows as they were read last."""
        self._reading = asyncio.Lock()
        self._noted: tuple[str, int, Mapping[str, Any]] = ("", 0, {})
        """The note in this process's row: the row's id, the revision and the report."""
        self._noted_at = 0.0
        self._adding: dict[str, asyncio.Task[None]] = {}
        self._retiring: dict[str, asyncio.Task[None]] = {}
        """Tasks that make engines ready, and that wait for the calls of removed engines to end, by
        the engine's base URL."""
        self._store_failed = False
        self._resting = False
        self._used_at = time.monotonic()
        """The time at which this process had calls or changed the rows last."""
        self._looked_at = 0.0
        """The time of the latest read while this process rested."""
        self._sealed = Grouped(self._store.sealed_among)
        self._names = Grouped(self._store.named_among)
        self._looks = Periodic("gates", _EVERY_S, self._look)

    async def start(self) -> None:
        named = {name: [*map(engine_base, urls)] for name, urls in self._named.items()}
        await asyncio.to_thread(self._store.join, self._writer.id, named)
        await self._read()
        for pool in self._pools.values():
            pool.gate.read = self._read_for_a_call
        self._looks.start()

    async def close(self) -> None:
        await self._looks.close()
        for task in (*self._adding.values(), *self._retiring.values()):
            task.cancel()
        self._store.close()

    # -- reading ---------------------------------------------------------------------------------

    async def is_sealed(self, session_id: str) -> bool:
        """Return whether a session is sealed, wherever that was done.

        Raise ``ApiError`` if the store cannot be read.
        """
        ask = partial(self._ask, self._store.is_sealed, self._sealed, session_id)
        return await self._patiently(ask)

    async def is_named(self, name: str) -> bool:
        """Return whether a session has the name, wherever it was made.

        Raise :class:`StoreUnavailable`.
        """
        return await self._ask(self._store.is_named, self._names, name)

    async def _ask(self, read: Callable[[str], bool], grouped: Grouped, value: str) -> bool:
        """Return the result of ``read`` for ``value``.

        Calls that ask at the same time share a query of a server, the one of ``grouped``.
        """
        if self._store.remote:
            return await grouped.has(value)
        if self._store.ready:
            try:
                return read(value)
            except StoreUnavailable:
                pass  # The file is locked; a thread may wait for it.
        return await asyncio.to_thread(read, value)

    async def _read_for_a_call(self) -> None:
        self._used_at = time.monotonic()
        await self._patiently(self._read)

    async def _patiently(self, read: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of ``read``.

        A store that is away is tried again for as long as a record would wait for it.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return await read()
            except StoreUnavailable as error:
                if time.monotonic() > deadline:
                    raise store_unavailable() from error
            await asyncio.sleep(_RETRY_S)

    async def _read(self) -> None:
        """Read the rows and let calls pass by them. Raise :class:`StoreUnavailable`."""
        async with self._reading:
            if self._resting:
                await self._write_note(self._report(), resting=False)
            began = time.monotonic()
            await self._read_rows()
            self._set_fresh(began)

    async def _read_rows(self) -> None:
        """Read the rows and set the gates and pools by them."""
        if self._store.ready:
            newest = self._store.revision()
        else:
            newest = await asyncio.to_thread(self._store.revision)
        if newest != self._rows.revision:
            self._rows = await asyncio.to_thread(self._store.read)
            self._apply()

    async def learn(self) -> None:
        """Read the rows if this process rests, for a reply about them; it goes on to rest.

        Raise ``ApiError`` if the store cannot be read.
        """
        if self._resting:
            await self._patiently(self._read_at_rest)

    async def _read_at_rest(self) -> None:
        async with self._reading:
            await self._read_rows()

    def _set_fresh(self, since: float) -> None:
        for pool in self._pools.values():
            pool.gate.fresh_until = since + FRESH_S

    def _apply(self) -> None:
        for name, pool in self._pools.items():
            row = self._rows.gates[name]
            pool.gate.set(Policy(row.version, row.model), paused=row.paused)
            own = self._rows.engines.get(name, {})
            for engine in pool.set_engines(own):
                url = engine.base
                _keep(self._retiring, url, engine.retired())
            for url in own.keys() - pool.urls() - self._adding.keys():
                _keep(self._adding, url, self._add(pool, url))

    async def _add(self, pool: EnginePool, url: str) -> None:
        await pool.add(url)
        self._apply()

    async def _look(self) -> None:
        try:
            if self._resting:
                await self._look_at_rest()
            else:
                await self._read()
                await self._note()
                await self._rest_if_idle()
        except StoreUnavailable as error:
            if not self._store_failed:
                log.warning("gates_not_read", extra={"error": str(error)})
            self._store_failed = True
        else:
            self._store_failed = False

    async def _look_at_rest(self) -> None:
        now = time.monotonic()
        if now > self._looked_at + REST_S:
            self._looked_at = now
            await self._read_at_rest()
            if self._noted[0] != self._writer.id:  # Its lease had run out.
                await self._write_note(self._report(), resting=True)
            if self._busy():  # There is a new engine to make ready.
                await self._read()

    async def _rest_if_idle(self) -> None:
        """Rest if the store is on a server and this process has had no calls for a while."""
        async with self._reading:
            now = time.monotonic()
            if self._busy():
                self._used_at = now
            if not self._store.remote or now < self._used_at + _IDLE_S:
                return
            self._set_fresh(-math.inf)  # From here on no call passes.
            await self._write_note(self._report(), resting=True)
            self._looked_at = now

    def _busy(self) -> bool:
        gates = [pool.gate for pool in self._pools.values()]
        return bool(
            self._adding or self._retiring or any(gate.running or gate.waiting for gate in gates)
        )

    def _report(self) -> dict[str, Any]:
        gates = [pool.gate for pool in self._pools.values()]
        return {
            "running": sum(gate.running for gate in gates),
            "waiting": sum(gate.waiting for gate in gates),
            "retiring": list(self._retiring),
        }

    async def _note(self) -> None:
        """Note in this process's row what has been read, and the running calls.

        Do so at once if others may wait for them.
        """
        report, noted = self._report(), self._noted
        now, note = time.monotonic(), (self._writer.id, self._rows.revision, report)
        awaited = note[:2] != noted[:2] or self._retiring or noted[2].get("retiring")
        paused = any(pool.gate.paused for pool in self._pools.values())
        if awaited or paused or now > self._noted_at + _REPORT_S:
            if note != noted:
                await self._write_note(report, resting=False)
            self._noted_at = now

    async def _write_note(self, report: dict[str, Any], *, resting: bool) -> None:
        note = (self._writer.id, self._rows.revision, {**report, **_RESTING[resting]})
        # Without an answer the row may say that this process rests, or may not.
        self._resting |= resting
        await asyncio.to_thread(self._store.report, *note)
        self._noted, self._resting = note, resting

    # -- changes ---------------------------------------------------------------------------------

    async def publish(
        self, policy: Policy, engine: str | None, *, back: bool, name: str = DEFAULT_POLICY
    ) -> None:
        """Publish a version of the policy ``name`` for its engines, or for one ``engine``.

        Raise ``KeyError`` for an unknown name,
        :class:`bridle.store.operations.gates.StaleVersion`,
        :class:`bridle.store.errors.NotFound` for an unknown engine, and ``ApiError``.
        """
        pool = self._pools[name]
        url = None if engine is None else pool.url_of(engine)
        revision = await self._change(
            lambda: self._store.publish(name, policy.version, policy.model, url, back=back)
        )
        await self._learn(name, revision, url)

    async def _learn(self, name: str, published: int, url: str | None) -> None:
        """Ask engines for the fingerprints of the weights that were published, and record them."""
        try:
            found = await self._pools[name].learn_fingerprints(url)
        except NotFound:
            return  # Another process has removed the engine since.
        if any(found.values()):
            await self._change(lambda: self._store.set_fingerprints(name, published, found))

    async def pause(self, drain_s: float | None) -> None:
        """Hold new calls back everywhere.

        Return when no call runs any more, or after ``drain_s`` seconds; with ``None`` do not wait
        for the running calls.
        """
        revision = await self._change(lambda: self._store.set_paused(True))
        if drain_s is not None:
            deadline = time.monotonic() + drain_s
            for pool in self._pools.values():
                await pool.gate.drained(deadline - time.monotonic())
            await self._others(revision, lambda member: not member.report["running"], deadline)

    async def resume(self) -> None:
        await self._change(lambda: self._store.set_paused(False))

    async def add_engine(self, url: str, version: int) -> None:
        """Add an engine to the default policy; a known engine stays as it is.

        Raise ``ValueError`` if ``url`` is not an HTTP URL, and for an engine of a further policy.
        """
        base = engine_base(url)
        EngineAddress.of(base)
        known = base in self._rows.engines.get(DEFAULT_POLICY, {})
        revision = await self._change(lambda: self._store.add_engine(DEFAULT_POLICY, base, version))
        if base in self._adding:
            await asyncio.wait([self._adding[base]])
        if not known:
            await self._learn(DEFAULT_POLICY, revision, base)

    async def remove_engine(self, name: str) -> None:
        """Remove an engine. Return when its running calls have ended in every process.

        Raise :class:`bridle.store.errors.NotFound` for an unknown engine, and ``ValueError`` for
        the last one.
        """
        url = self._engines.url_of(name)
        revision = await self._change(lambda: self._store.remove_engine(DEFAULT_POLICY, url))
        if url in self._retiring:
            await asyncio.wait([self._retiring[url]])
        await self._others(revision, lambda member: url not in member.report["retiring"])

    async def state(self) -> GateState:
        await self.learn()
        gates = {name: pool.gate for name, pool in self._pools.items()}
        default = gates[DEFAULT_POLICY]
        members = await self._in_store(lambda: self._store.others(self._writer.id))
        others = [member.report for member in members if member.report]
        return GateState(
            version=default.policy.version,
            model=default.policy.model,
            paused=default.paused,
            running=sum(gate.running for gate in gates.values())
            + sum(report["running"] for report in others),
            waiting=sum(gate.waiting for gate in gates.values())
            + sum(report["waiting"] for report in others),
            policies={name: gate.version for name, gate in gates.items() if gate is not default},
        )

    async def _change(self, change: Callable[[], int]) -> int:
        """Make a change of the rows and return its revision, once it holds everywhere."""
        self._used_at = time.monotonic()
        revision = await self._in_store(change)
        deadline = time.monotonic() + FRESH_S
        await self._patiently(self._read)
        await self._others(revision, lambda _: True, deadline)
        return revision

    async def _others(
        self, revision: int, done: Callable[[Member], bool], deadline: float = math.inf
    ) -> None:
        """Wait until every other live process has read ``revision`` and is ``done`` by its report.

        Wait no longer than until the ``deadline`` on the monotonic clock.
        """
        while True:
            members = await self._in_store(lambda: self._store.others(self._writer.id))
            awaited = (member for member in members if not member.resting)
            if all(member.seen >= revision and done(member) for member in awaited):
                return
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(_LOOK_S)

    async def _in_store(self, action: Callable[[], Result]) -> Result:
        try:
            return await asyncio.to_thread(action)
        except StoreUnavailable as error:
            raise store_unavailable() from error


def _keep(tasks: dict[str, asyncio.Task[None]], url: str, work: Any) -> None:
    """Run ``work`` as a task that ``tasks`` holds until it is over."""
    task = tasks[url] = asyncio.create_task(work)
    task.add_done_callback(lambda _: tasks.pop(url, None))
