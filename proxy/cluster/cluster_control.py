"""What the control API changes for the whole proxy, in every worker process of it.

A change is applied here, told to the siblings and, when it must outlive the process, kept in the
store before the caller is answered. Each worker keeps the last change of every thing as it was
told, for the workers that start later: they heard nothing of it and begin with the settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from typing import Any, Final

import msgspec

from bridle.proxy.cluster.siblings import Message, Siblings, SiblingSilent
from bridle.proxy.engines.policy_gate import Policy, PolicyGate
from bridle.proxy.engines.pool import EnginePool, EngineState
from bridle.proxy.recording.metrics import Metrics, merged
from bridle.proxy.sessions.registry import Sessions, store_unavailable
from bridle.proxy.wire.canonical import ApiError
from bridle.store.errors import StoreUnavailable
from bridle.store.reading.queries import Reader
from bridle.store.records import ServedPolicy
from bridle.store.writing.writer import Writer

log = logging.getLogger("bridle.proxy")

_ANSWER_S: Final = 10.0
_DRAIN_ANSWER_S: Final = 10.0
"""How much later than its own time-out a sibling may answer."""


class GateState(msgspec.Struct, frozen=True):
    """The gate over all workers."""

    version: int
    model: str | None
    paused: bool
    running: int
    waiting: int


class ClusterControl:
    """Start it after the pool."""

    def __init__(
        self,
        gate: PolicyGate,
        engines: EnginePool,
        sessions: Sessions,
        metrics: Metrics,
        writer: Writer,
        reader: Reader,
        siblings: Siblings,
    ) -> None:
        self._gate = gate
        self._engines = engines
        self._sessions = sessions
        self._metrics = metrics
        self._writer = writer
        self._reader = reader
        self._siblings = siblings
        self._changes: dict[str, Message] = {}
        """The last change of each thing in the life of this proxy, by :func:`_about`."""
        self._ready = asyncio.Event()
        """Where the proxy was is known; changes that siblings tell come after that."""

    async def start(self) -> None:
        """Takes up where the proxy was: versions from the store, and from the siblings what they
        know to have been changed since. One that is just starting, too, may know of nothing."""
        await self._siblings.start(self._handle)
        served = await asyncio.to_thread(self._reader.served)
        known = [served[state.url] for state in self._engines.states() if state.url in served]
        if known:
            newest = max(known, key=lambda one: (one.version, one.reported_at))
            self._gate.publish(Policy(newest.version, newest.model), back=True)
            for one in known:
                self._engines.published(
                    one.version, one.engine, {one.engine: one.weights_fingerprint}
                )
        # One that hangs is ended by the supervisor; a start that fails would end all workers.
        told = await self._siblings.ask({"do": "changes"}, patience_s=None)
        for change in sorted(itertools.chain.from_iterable(told), key=_turn):
            await self._change(change)
        self._ready.set()

    async def publish(self, policy: Policy, engine: str | None, *, back: bool) -> None:
        """Raises :class:`bridle.proxy.engines.policy_gate.StaleVersion` and :class:`ApiError`."""
        if engine is None or policy.version > self._gate.version:
            self._gate.publish(policy, back=back)
        self._engines.published(policy.version, engine)
        publishes = self._engines.publishes()
        change = {"version": policy.version, "model": policy.model, "engine": engine, "at": _now()}
        fingerprints = await self._engines.learn_fingerprints(engine)
        await self._announce({"do": "publish", **change, "fingerprints": fingerprints})
        now, latest = time.time(), self._engines.publishes()
        records = [
            ServedPolicy(url, policy.version, policy.model, now, fingerprint)
            for url, fingerprint in fingerprints.items()
            if latest.get(url) == publishes[url]
        ]
        try:
            await self._writer.record_served(*records)
        except StoreUnavailable as error:
            raise store_unavailable() from error

    async def pause(self, drain_s: float | None) -> None:
        """New calls wait everywhere; returns when none runs any more, or after ``drain_s``.

        Raises :class:`ApiError` when a worker does not answer; all is as it was then.
        """
        before = self._gate.paused
        self._gate.pause()
        try:
            await self._announce({"do": "pause", "at": _now()})
            if drain_s is not None:
                patience = drain_s + _DRAIN_ANSWER_S
                others = self._tell({"do": "drain", "timeout_s": drain_s}, patience_s=patience)
                await asyncio.gather(self._gate.drained(drain_s), others)
        except ApiError:
            if not before:
                # Who hears that it failed will not think of resuming.
                with contextlib.suppress(ApiError):
                    await self.resume()
            raise

    async def resume(self) -> None:
        self._gate.resume()
        await self._announce({"do": "resume", "at": _now()})

    async def add_engine(self, url: str, version: int) -> None:
        """An engine that is known stays as it is. Raises ``ValueError`` as :meth:`EnginePool.add`
        does."""
        added = await self._engines.add(url, version)
        if added is None:
            return
        change = {"url": added.endpoint.base, "version": version, "at": _now()}
        await self._announce(
            {"do": "add_engine", **change, "weights_fingerprint": await added.serves.learn()}
        )

    async def remove_engine(self, name: str) -> None:
        """Raises ``KeyError`` and ``ValueError`` as :meth:`EnginePool.take_out` does."""
        engine = self._engines.take_out(name)
        change = {"do": "remove_engine", "url": engine.endpoint.base, "at": _now()}
        # Others answer when their running calls are over; the supervisor ends those that hang.
        await asyncio.gather(engine.retired(), self._announce(change, patience_s=None))

    async def forget_session(self, session_id: str) -> None:
        """The session has changed in the store: other workers must read it again."""
        await self._tell({"do": "forget_session", "id": session_id})

    async def state(self) -> GateState:
        """The gate, its running and waiting calls summed over the workers."""
        own = self._own_state()
        others = await self._tell({"do": "state"})
        return GateState(
            version=own.version,
            model=own.model,
            paused=own.paused,
            running=own.running + sum(other["running"] for other in others),
            waiting=own.waiting + sum(other["waiting"] for other in others),
        )

    async def engines(self) -> list[EngineState]:
        """The engines as this worker sees them, with what runs and failed in all workers."""
        states = self._engines.states()
        for others in await self._tell({"do": "engines"}):
            by_url = {other["url"]: other for other in others}
            states = [_sum(state, by_url.get(state.url)) for state in states]
        return states

    async def metrics(self) -> bytes:
        """Every worker's metrics; where there are several, each sample says whose it is."""
        own = self._metrics.exposition()
        if self._siblings.alone:
            return own
        others = await self._tell({"do": "metrics"})
        return merged({os.getpid(): own.decode(), **dict(others)})

    def _own(self, asked: str) -> Any:
        """This worker's part of what is asked of all."""
        match asked:
            case "state":
                return msgspec.to_builtins(self._own_state())
            case "engines":
                return msgspec.to_builtins(self._engines.states())
            case _:
                return os.getpid(), self._metrics.exposition().decode()

    def _own_state(self) -> GateState:
        gate = self._gate
        return GateState(
            gate.policy.version, gate.policy.model, gate.paused, gate.running, gate.waiting
        )

    async def _announce(self, change: Message, *, patience_s: float | None = _ANSWER_S) -> None:
        """Tells a change that was made here. Nothing is awaited between keeping it and looking who
        listens: a worker that does not yet will ask for it."""
        self._keep(change)
        await self._tell(change, patience_s=patience_s)

    async def _tell(self, message: Message, *, patience_s: float | None = _ANSWER_S) -> list[Any]:
        try:
            return await self._siblings.ask(message, patience_s=patience_s)
        except SiblingSilent as error:
            raise ApiError("overloaded", str(error), status=503, retry_after=1.0) from error

    async def _handle(self, message: Message) -> Any:
        """A sibling's message. Who has yet to learn where the proxy is has no part in what is asked
        of all, and makes changes afterwards."""
        match message:
            case {"do": "changes"}:
                return list(self._changes.values())
            case {"do": "state" | "engines" | "metrics" as asked}:
                return self._own(asked) if self._ready.is_set() else None
        await self._ready.wait()
        match message:
            case {"do": "drain", "timeout_s": timeout_s}:
                return await self._gate.drained(timeout_s)
            case {"do": "forget_session", "id": session_id}:
                self._sessions.forget(session_id)
            case _:
                await self._change(message)
        return True

    async def _change(self, change: Message) -> None:
        """Makes a sibling's change here, too, unless it or a later one of the same is known."""
        if not self._keep(change):
            return
        match change:
            case {
                "do": "publish",
                "version": version,
                "model": model,
                "engine": engine,
                "fingerprints": fingerprints,
            }:
                if engine is None or version > self._gate.version:
                    self._gate.publish(Policy(version, model), back=True)
                with contextlib.suppress(KeyError):  # It has been removed since.
                    self._engines.published(version, engine, fingerprints)
            case {"do": "pause"}:
                self._gate.pause()
            case {"do": "resume"}:
                self._gate.resume()
            case {
                "do": "add_engine",
                "url": url,
                "version": version,
                "weights_fingerprint": fingerprint,
            }:
                if await self._engines.add(url, version, fingerprint) is None:
                    self._engines.published(version, url, {url: fingerprint})
            case {"do": "remove_engine", "url": url}:
                await self._remove(url)

    async def _remove(self, url: str) -> None:
        try:
            await self._engines.remove(url)
        except KeyError:
            pass  # It was added and removed before this worker knew of it.
        except ValueError as error:
            log.warning("engine_kept", extra={"error": str(error)})

    def _keep(self, change: Message) -> bool:
        """Keeps ``change`` for those who start later; whether it is the latest of its thing."""
        known = self._changes.get(_about(change))
        if known is not None and known["at"] >= change["at"]:
            return False
        self._changes[_about(change)] = change
        return True


def _now() -> float:
    """Orders changes by when they were made; one clock for all processes of a machine."""
    return time.monotonic()


def _about(change: Message) -> str:
    """The thing that ``change`` is the last word on until there is a later one."""
    match change:
        case {"do": "publish", "engine": engine}:
            return f"version of {engine or 'all'}"
        case {"do": "add_engine" | "remove_engine", "url": url}:
            return f"membership of {url}"
    return "pause"


def _turn(change: Message) -> tuple[bool, float]:
    """Where ``change`` stands among those that a worker makes up for at its start: an engine of the
    settings may be removed only when those that were added instead are there."""
    return change["do"] == "remove_engine", change["at"]


def _sum(state: EngineState, other: Any) -> EngineState:
    if other is None:
        return state
    return msgspec.structs.replace(
        state,
        changed=state.changed or other["changed"],
        usable=state.usable and other["usable"],
        running=state.running + other["running"],
        retries=state.retries + other["retries"],
        ejections=state.ejections + other["ejections"],
        changes=state.changes + other["changes"],
    )
