"""Changes that hold for every proxy process of one deployment.

A change is appended to the deployment's control log in the store, and every process applies the log
in its order (``store/operations/control.py``). All processes therefore reach the same state: the
versions of the policies, the pause and the engines. The process that handles a request waits until
all other live processes have applied the change. A process that starts later applies the whole log
first.

A change of versions names its policy; without a name it is about the default one. A pause holds for
all policies. Only the default policy's engines can be added and removed.

The same log carries requests for reports: each process answers with its running calls, its engines
and its metrics, in its row of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bridle.proxy.cluster.reports import GateState, ProcessReport, engine_states, gate_state
from bridle.proxy.engines.engine import PooledEngine
from bridle.proxy.engines.policy_gate import Policy
from bridle.proxy.engines.pool import EnginePool, EngineState, Fingerprints
from bridle.proxy.periodic import Periodic
from bridle.proxy.recording.metrics import Metrics, merged
from bridle.proxy.sessions.registry import Sessions, store_unavailable
from bridle.proxy.settings import ProxySettings, engine_base
from bridle.proxy.wire.canonical import ApiError
from bridle.store.errors import StoreUnavailable
from bridle.store.operations.control import ControlLog, Member
from bridle.store.reading.queries import Reader
from bridle.store.records import DEFAULT_POLICY, ServedPolicy
from bridle.store.writing.writer import Writer

log = logging.getLogger("bridle.proxy")

Change = Mapping[str, Any]

_EVERY_S: Final = 0.05
"""Seconds between two reads of the log."""
_LOOK_S: Final = 0.02
"""Seconds between two reads of the revisions that the other processes have applied."""
_REPORT_S: Final = 0.25
"""Seconds between two reports while the running calls end."""
_PATIENCE_S: Final = 10.0
_REFUSALS: Final = (ValueError, KeyError)
"""Exceptions of a change that is refused. Such a change has no effect in any process."""


class ClusterControl:
    """Appends the changes of this process to the log and applies those of all processes. Start it
    after the pools."""

    def __init__(
        self,
        settings: ProxySettings,
        pools: Mapping[str, EnginePool],
        sessions: Sessions,
        metrics: Metrics,
        writer: Writer,
        reader: Reader,
    ) -> None:
        """``pools`` holds the engines of each policy, by the policy's name."""
        self._pools = pools
        self._gates = {name: pool.gate for name, pool in pools.items()}
        self._engines = pools[DEFAULT_POLICY]
        self._sessions = sessions
        self._metrics = metrics
        self._writer = writer
        self._reader = reader
        self._workers = settings.workers
        self._control = ControlLog(reader.engine, settings.deployment)
        self._joined_as = ""
        """Id of the row in the store in which this process acknowledges changes."""
        self._applied = 0
        """The newest revision that was applied here."""
        self._report: dict[str, Any] = {}
        self._applying = asyncio.Lock()
        self._retiring: dict[str, asyncio.Task[None]] = {}
        """Tasks that wait for the calls of removed engines to end, by the engine's base URL."""
        self._store_failed = False
        self._looks = Periodic("control-log", _EVERY_S, self._look)

    async def start(self) -> None:
        """Restore the versions that the store has for the engines, and apply the log."""
        served = await asyncio.to_thread(self._reader.served)
        for pool in self._pools.values():
            pool.restore(served)
        self._joined_as = self._writer.id
        await asyncio.to_thread(self._control.join, self._joined_as)
        await self._apply_new()
        self._looks.start()

    async def close(self) -> None:
        await self._looks.close()
        for task in self._retiring.values():
            task.cancel()

    async def publish(
        self, policy: Policy, engine: str | None, *, back: bool, name: str = DEFAULT_POLICY
    ) -> None:
        """Publish a version of the policy ``name`` for its engines, or for one ``engine``.

        Raise ``KeyError`` for an unknown name,
        :class:`bridle.proxy.engines.policy_gate.StaleVersion` and :class:`ApiError`.
        """
        pool = self._pools[name]
        stamp = {"version": policy.version, "model": policy.model, "engine": engine, "back": back}
        await self._change({"do": "publish", "policy": name, **stamp})
        try:
            fingerprints = await pool.learn_fingerprints(engine)
        except KeyError:
            return  # Another process has removed the engine since.
        await self._share(name, policy.version, fingerprints)
        now, latest = time.time(), pool.versions()
        records = [
            ServedPolicy(url, policy.version, policy.model, now, fingerprint)
            for url, fingerprint in fingerprints.items()
            if latest.get(url) == policy.version
        ]
        try:
            await self._writer.add(*records)
        except StoreUnavailable as error:
            raise store_unavailable() from error

    async def _share(self, name: str, version: int, found: Fingerprints) -> None:
        if any(found.values()):
            learned = {"policy": name, "version": version, "fingerprints": dict(found)}
            await self._change({"do": "fingerprints", **learned})

    async def pause(self, drain_s: float | None) -> None:
        """Hold new calls back everywhere. Return when no call runs any more, or after ``drain_s``.

        Raise :class:`ApiError` when a process does not answer; the pause is then undone, unless it
        was there before.
        """
        before = self._gates[DEFAULT_POLICY].paused
        try:
            await self._change({"do": "pause"})
            if drain_s is not None:
                await self._drained(time.monotonic() + drain_s)
        except ApiError:
            if not before:
                # A caller whose pause has failed does not call resume.
                with contextlib.suppress(ApiError):
                    await self.resume()
            raise

    async def _drained(self, deadline: float) -> None:
        for gate in self._gates.values():
            await gate.drained(max(0.0, deadline - time.monotonic()))
        while time.monotonic() < deadline:
            if not (await self.state()).running:
                return
            await asyncio.sleep(_REPORT_S)

    async def resume(self) -> None:
        await self._change({"do": "resume"})

    async def add_engine(self, url: str, version: int) -> None:
        """Add an engine to the default policy; a known engine stays as it is.

        Raise ``ValueError`` as :meth:`EnginePool.add` does, and for an engine of a further policy.
        """
        for name, pool in self._pools.items():
            if pool is not self._engines and engine_base(url) in pool.versions():
                raise ValueError(f"{url} serves the policy {name}")
        before = self._engines.versions()
        await self._change({"do": "add_engine", "url": url, "version": version})
        for added in self._engines.versions().keys() - before.keys():
            fingerprints = await self._engines.learn_fingerprints(added)
            await self._share(DEFAULT_POLICY, version, fingerprints)

    async def remove_engine(self, name: str) -> None:
        """Remove an engine. Return when its running calls have ended in every process.

        Raise ``KeyError`` and ``ValueError`` as :meth:`EnginePool.take_out` does.
        """
        url = self._engines.url_of(name)
        await self._change({"do": "remove_engine", "url": url})
        if url in self._retiring:
            await asyncio.wait([self._retiring[url]])
        while True:
            if all(url not in report.retiring for report in await self._reports()):
                return
            await asyncio.sleep(_REPORT_S)

    async def forget_session(self, session_id: str) -> None:
        """Make the other processes read a session again, because it has changed in the store."""
        await self._request({"do": "forget_session", "id": session_id})

    async def state(self) -> GateState:
        """Return the state of the gates, with the running and waiting calls of all processes."""
        return gate_state(self._gates, await self._reports())

    async def engines(self) -> list[EngineState]:
        """Return the engines of all policies as this process sees them, with the calls and failures
        of all processes."""
        return engine_states(self._states(), await self._reports())

    def _states(self) -> list[EngineState]:
        return [state for pool in self._pools.values() for state in pool.states()]

    async def metrics(self) -> bytes:
        """Return the metrics of all workers of this port, each sample with its ``worker``. A
        process that has the port alone returns its own metrics without that label."""
        own = self._metrics.exposition()
        if self._workers is None:
            return own
        workers = [one for one in await self._reports() if one.workers == self._workers]
        return merged({os.getpid(): own.decode(), **{one.pid: one.metrics for one in workers}})

    # -- the log ---------------------------------------------------------------------------------

    async def _change(self, change: Change) -> None:
        """Apply ``change`` in every process. Raise the exception that applying it here raised."""
        async with self._applying:
            revision = await self._in_store(self._control.append, change)
            refusal = (await self._apply_new()).get(revision)
        if refusal is not None:
            raise refusal
        await self._acknowledged(revision)

    async def _reports(self) -> list[ProcessReport]:
        """Return a new report of every other process."""
        members = await self._request({"do": "report"})
        return [msgspec.convert(member.report, ProcessReport) for member in members]

    async def _request(self, request: Change) -> list[Member]:
        """Have every other process handle ``request``, and return these processes. The request is
        then removed from the log, since a process that starts later does not need it."""
        if not await self._in_store(self._control.others, self._joined_as):
            return []
        revision = await self._in_store(self._control.append, request)
        try:
            return await self._acknowledged(revision)
        finally:
            await self._in_store(self._control.remove, revision)

    async def _acknowledged(self, revision: int) -> list[Member]:
        """Wait until all other live processes have applied ``revision``, and return them. Raise
        :class:`ApiError` if they take too long."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            members: list[Member] = await self._in_store(self._control.others, self._joined_as)
            behind = [member for member in members if member.revision < revision]
            if not behind:
                return members
            if time.monotonic() > deadline:
                names = ", ".join(f"{member.pid} on {member.host}" for member in behind)
                message = f"these proxy processes do not answer: {names}"
                raise ApiError("overloaded", message, status=503, retry_after=1.0)
            await asyncio.sleep(_LOOK_S)

    async def _in_store(self, action: Any, *arguments: Any) -> Any:
        try:
            return await asyncio.to_thread(action, *arguments)
        except StoreUnavailable as error:
            raise store_unavailable() from error

    async def _look(self) -> None:
        try:
            async with self._applying:
                await self._apply_new()
        except ApiError as error:
            if not self._store_failed:
                log.warning("control_log_not_read", extra={"error": error.message})
            self._store_failed = True
        else:
            self._store_failed = False

    async def _apply_new(self) -> dict[int, Exception]:
        """Apply the new changes of the log and acknowledge them. Return the refusals by
        revision."""
        refusals: dict[int, Exception] = {}
        changes = await self._in_store(self._control.since, self._applied)
        for revision, change in changes:
            try:
                await self._apply(change)
            except _REFUSALS as error:
                refusals[revision] = error
                log.warning("change_refused", extra={"change": change["do"], "error": str(error)})
            self._applied = revision
        if changes or self._joined_as != self._writer.id:
            self._joined_as = row = self._writer.id
            await self._in_store(self._control.acknowledge, row, self._applied, self._report)
        return refusals

    async def _apply(self, change: Change) -> None:
        match change:
            case {"do": "publish", "version": version, "engine": engine, "model": model}:
                pool = self._pool_of(change)
                if engine is None or version > pool.gate.version:
                    pool.gate.publish(Policy(version, model), back=change["back"])
                pool.published(version, engine)
            case {"do": "fingerprints", "version": version, "fingerprints": fingerprints}:
                self._pool_of(change).learned(version, fingerprints)
            case {"do": "pause"}:
                for gate in self._gates.values():
                    gate.pause()
            case {"do": "resume"}:
                for gate in self._gates.values():
                    gate.resume()
            case {"do": "add_engine", "url": url, "version": version}:
                await self._engines.add(url, version)
            case {"do": "remove_engine", "url": url}:
                self._retire(self._engines.take_out(url))
            case {"do": "forget_session", "id": session_id}:
                self._sessions.forget(session_id)
            case {"do": "report"}:
                self._report = msgspec.to_builtins(self._own_report())

    def _pool_of(self, change: Change) -> EnginePool:
        """Return the engines of the policy that a change names. Raise ``KeyError``."""
        return self._pools[change.get("policy", DEFAULT_POLICY)]

    def _retire(self, engine: PooledEngine) -> None:
        url = engine.base
        task = self._retiring[url] = asyncio.create_task(engine.retired())
        task.add_done_callback(lambda _: self._retiring.pop(url, None))

    def _own_report(self) -> ProcessReport:
        return ProcessReport(
            pid=os.getpid(),
            workers=self._workers,
            running=sum(gate.running for gate in self._gates.values()),
            waiting=sum(gate.waiting for gate in self._gates.values()),
            engines=self._states(),
            retiring=list(self._retiring),
            metrics=self._metrics.exposition().decode(),
        )
