"""The engines that serve one model, their gate, and the choice of one of them for each call.

A session stays with its engine, whose prefix cache holds its history; a new session goes to the
engine with the fewest running calls. An engine gets no calls while its circuit is open, while it
serves another policy version than the pool's (its tokens would be stale although nobody has decided
so), and while it reports other weights than those published to it
(:mod:`bridle.proxy.engines.weights`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from bridle.proxy.engines.circuit import CircuitState
from bridle.proxy.engines.engine import PooledEngine
from bridle.proxy.engines.request import UpstreamFields
from bridle.proxy.engines.weights import other_weights
from bridle.proxy.periodic import Periodic
from bridle.proxy.settings import ProxySettings, engine_base
from bridle.proxy.wire.canonical import ApiError, Request
from bridle.store.errors import NotFound
from bridle.store.operations.gates import Served
from bridle.store.records import Note

_SHORTEST_RETRY_S: Final = 1.0
_LOOK_S: Final = 0.02
"""Seconds between two looks at the running calls."""

Answer = TypeVar("Answer")
Fingerprints = Mapping[str, str | None]
"""The weights fingerprints that engines reported, by base URL."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy version and model that the trainer reported last."""

    version: int = 0
    model: str | None = None
    """The served model name if it changes with the version (LoRA), else ``None``."""


class PolicyGate:
    """A counter of running calls, which holds new calls back while it is paused.

    A policy's version and pauses are rows in the store (``store/operations/gates.py``), which the
    proxy reads again and again (``proxy/deployment.py``). The gate has what was read last. It lets
    no call pass on what is older than ``fresh_until``.

    Its attributes are plain, so that a call that passes the open gate costs next to nothing. A call
    awaits :meth:`passed` if the gate is ``paused`` or ``time.monotonic()`` is later than
    ``fresh_until``. Then it adds 1 to ``running``, and subtracts 1 when it is over.
    """

    def __init__(self) -> None:
        self.policy = Policy()
        self.version = 0
        """The version of ``policy``."""
        self.paused = False
        self.running = 0
        self.waiting = 0
        self.fresh_until = math.inf
        """The time until which calls may pass on what was read last; without end for a model whose
        gate has no row."""
        self.read: Callable[[], Awaitable[None]] = _nothing
        """Reads the row, or raises :class:`~bridle.proxy.wire.canonical.ApiError`."""
        self._open = asyncio.Event()
        self._open.set()

    def set(self, policy: Policy, *, paused: bool) -> None:
        self.policy, self.version, self.paused = policy, policy.version, paused
        if paused:
            self._open.clear()
        else:
            self._open.set()

    async def passed(self) -> None:
        """Wait until the gate is open by what was read a moment ago."""
        self.waiting += 1
        try:
            # The gate may close again before a task that waits here runs.
            while self.paused or time.monotonic() > self.fresh_until:
                await self._open.wait()
                if time.monotonic() > self.fresh_until:
                    await self.read()
        finally:
            self.waiting -= 1

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no call is running. Return ``False`` if some still are after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self.running:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_S)
        return True


async def _nothing() -> None:
    pass


class EngineState(msgspec.Struct, frozen=True):
    """The state of one engine, as the pool knows it."""

    name: str
    url: str
    circuit: CircuitState
    policy_version: int
    changed: bool
    usable: bool
    running: int
    retries: int
    ejections: int
    changes: int
    rendering_difference: str = ""


Homes = dict["EnginePool", PooledEngine]
"""The engine that a session stays with, by pool."""


class EnginePool:
    """The engines of one model. Start the pool inside the event loop that uses it."""

    def __init__(
        self,
        settings: ProxySettings,
        urls: Sequence[str],
        *,
        model: str | None = None,
        api_key: str | None = None,
        policy: str | None = None,
        external: bool = False,
        trained: bool = False,
        notes: tuple[Note, ...] = (),
    ) -> None:
        """Create the pool; no engine is asked yet.

        ``model`` is the model name that the engines are asked for. With ``None`` it is the client's
        if the engines list it, else the first that they list. ``external`` is true for the engines
        of another provider, which have no health route and are asked for the client's model name
        unless ``model`` is given. ``api_key`` is sent to the engines of ``urls``, never to an
        engine that is added later. ``trained`` is true if the tokens of these engines may be
        trained. They are then asked how they sample: at the start, and after connections to them
        have broken. The ids of other engines continue no ids of ours. ``policy`` is the name of the
        policy if it is not the default one. ``notes`` are those of every call.
        """
        self.gate = PolicyGate()
        self.model = model
        self.upstream_fields = UpstreamFields()
        self._settings = settings
        self.limits = settings.limits
        self.own_keys = settings.own_keys
        """The proxy's own keys, which are removed from everything that the engines send."""
        self.external = external
        self.trained = trained
        self.policy = policy
        self._shared = policy is not None and settings.shares_engine(policy)
        """True if the engines serve other policies, too: they are then asked for nothing but the
        model that was published."""
        self.speaks: frozenset[str] = frozenset()
        """The dialects whose requests these engines get as they are."""
        self.notes = notes
        self._api_key = api_key
        self._named_by_operator = frozenset(engine_base(url) for url in urls)
        self._engines: dict[str, PooledEngine] = {}
        for url in urls:
            engine = self._made(url, 0)
            self._engines[engine.base] = engine
        self._checks = Periodic("engine-health", settings.limits.health_check_s, self.check)

    async def start(self) -> None:
        if self.trained:
            await asyncio.gather(*(one.read_sampling() for one in self._engines.values()))
        if not self.external and self._settings.limits.health_check_s > 0:
            self._checks.start()

    async def close(self) -> None:
        await self._checks.close()
        for engine in self._engines.values():
            await engine.transport.close()

    # -- choosing --------------------------------------------------------------------------------

    def choose(
        self, session_id: str, homes: Homes, avoid: Collection[PooledEngine] = ()
    ) -> PooledEngine:
        """Return the engine for the session's next call.

        It is the one in ``homes`` while that is usable, else another one, which is put into
        ``homes``. An engine in ``avoid`` is chosen only if no other is left.

        Raises :class:`ApiError` (503) if none is usable.
        """
        home = homes.get(self)
        if home is not None and home not in avoid and self.usable(home):
            return home
        usable = self.usable_engines()
        if not usable:
            raise self._none_usable()
        fresh = [engine for engine in usable if engine not in avoid]
        chosen = min(fresh or usable, key=lambda one: (one.running, _rank(one, session_id)))
        homes[self] = chosen
        return chosen

    def usable_engines(self) -> list[PooledEngine]:
        return [engine for engine in self._engines.values() if self.usable(engine)]

    def usable(self, engine: PooledEngine) -> bool:
        serves, circuit = engine.serves, engine.circuit
        if engine.removed or serves.version != self.gate.version or serves.changed:
            return False
        return circuit.calm or circuit.admits

    def _none_usable(self) -> ApiError:
        behind = [one for one in self._engines.values() if one.circuit.admits]
        if any(one.version == self.gate.version for one in behind):
            return other_weights(self.gate.version)
        ejected = [one for one in self._engines.values() if one not in behind]
        waits = [one.circuit.retry_after for one in ejected]
        retry_after = max(_SHORTEST_RETRY_S, min(waits, default=_SHORTEST_RETRY_S))
        kind = "overloaded"
        if behind:
            what = f"no engine serves policy version {self.gate.version} yet"
        else:
            faults = {str(one.fault): None for one in ejected if one.fault is not None}
            what = ": ".join(["no engine is healthy", *filter(None, ["; ".join(faults)])])
            if ejected and all(_is_unreachable(one.fault) for one in ejected):
                kind = "upstream_unreachable"
        return ApiError(kind, what, status=503, retry_after=retry_after)

    # -- what the engines serve ------------------------------------------------------------------

    def set_engines(self, served: Mapping[str, Served]) -> list[PooledEngine]:
        """Set the version that was published to each engine, and return the removed engines.

        ``served`` has the engines' rows by base URL. The engines without a row are taken out of the
        pool. An engine that is not in the pool yet has to be added (:meth:`add`).
        """
        removed = [one for url, one in self._engines.items() if url not in served]
        for engine in removed:
            del self._engines[engine.base]
            engine.removed = True
        for url, one in self._engines.items():
            one.serves.set_row(served[url])
        return removed

    def urls(self) -> set[str]:
        return set(self._engines)

    async def learn_fingerprints(self, engine: str | None = None) -> Fingerprints:
        """Return the engines' fingerprints of the just published weights, by base URL.

        Ask ``engine`` (every engine if ``None``) for them. Raises :class:`NotFound` for an unknown
        engine.
        """
        meant = self._meant(engine)
        fingerprints = await asyncio.gather(*(one.serves.learn() for one in meant))
        return {one.base: fingerprint for one, fingerprint in zip(meant, fingerprints, strict=True)}

    def _meant(self, engine: str | None) -> list[PooledEngine]:
        return list(self._engines.values()) if engine is None else [self._named(engine)]

    async def models(self) -> tuple[dict[str, Any], ...]:
        """Return the model cards of one engine, a usable one if there is any.

        Raises :class:`ApiError`.
        """
        return await self._any(lambda one: one.models())

    async def model_name(self, engine: PooledEngine, requested: str) -> str:
        """Return the engine's name for the model that a client asked for.

        A name that the engine does not know stands for the policy. If the engine's list of models
        is needed and cannot be read, return ``requested``: the call itself will meet the same fault
        and is recorded with it. Raises :class:`ApiError` if the engine serves no model yet.
        """
        if self.external:
            return self.model or requested
        published = self.gate.policy.model
        if self._shared and published is None:
            message = f"no adapter of the policy {self.policy} has been published yet"
            raise ApiError("overloaded", message, status=503, retry_after=_SHORTEST_RETRY_S)
        named = published or self.model
        if named is not None:
            return named
        transport, names = engine.transport, engine.names
        same = transport.any_open and transport.connection_epoch == engine.names_epoch
        if not names or not same or time.monotonic() > engine.names_until:
            try:
                names = [str(card["id"]) for card in await engine.models()]
            except ApiError as error:
                if not error.kind.startswith("upstream_"):
                    raise
                return requested
        if not names:
            raise ApiError("overloaded", "the engine serves no model yet", status=503)
        return requested if requested in names else names[0]

    async def count_tokens(self, request: Request) -> tuple[int, str]:
        """Return the number of prompt tokens of ``request``, and the model name.

        The number is by the engines' own template. The name is the one that the engine was asked
        for.
        """

        async def count(engine: PooledEngine) -> tuple[int, str]:
            model = await self.model_name(engine, request.model)
            return await engine.count_tokens(request, model), model

        return await self._any(count)

    async def tokenize(
        self,
        messages: Sequence[Mapping[str, Any]],
        requested: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int] | None:
        """See :meth:`bridle.proxy.engines.engine.PooledEngine.tokenize`."""

        async def ids(engine: PooledEngine) -> list[int] | None:
            model = await self.model_name(engine, requested)
            return await engine.tokenize(messages, model, tools)

        return await self._any(ids)

    async def _any(self, ask: Callable[[PooledEngine], Awaitable[Answer]]) -> Answer:
        """Return the answer of the first engine that can be reached.

        The first engine is asked a second time at the end, because a pooled connection to it may
        have died.
        """
        engines = self.usable_engines() or list(self._engines.values())
        for engine in (*engines, engines[0]):
            try:
                return await ask(engine)
            except ApiError as error:
                if error.status not in (502, 503):
                    raise
                failure = error
        raise failure

    # -- health ----------------------------------------------------------------------------------

    def states(self) -> list[EngineState]:
        return [
            EngineState(
                name=one.name,
                url=one.base,
                circuit=one.circuit.state,
                policy_version=one.version,
                changed=one.serves.changed,
                usable=self.usable(one),
                running=one.running,
                retries=one.retries,
                ejections=one.circuit.openings,
                changes=one.serves.changes,
                rendering_difference=one.rendering.difference,
            )
            for one in self._engines.values()
        ]

    async def check(self) -> bool:
        """Check the health of every engine. Return True if at least one is healthy and usable."""
        engines = list(self._engines.values())
        return any(await asyncio.gather(*map(self._check, engines)))

    async def _check(self, engine: PooledEngine) -> bool:
        fault = await engine.check_health()
        well = fault is None
        if well:
            # Before its circuit admits calls again. One that cannot say now is asked before a call.
            with contextlib.suppress(ApiError):
                await engine.serves.compare()
            if self.trained and not engine.sampling_known:
                await engine.read_sampling()
        engine.circuit.checked(well)
        engine.report(fault)
        return well and self.usable(engine)

    # -- membership ------------------------------------------------------------------------------

    async def add(self, url: str) -> None:
        """Add an engine. It gets no call before its version is set."""
        engine = self._made(url, -1)
        if self.trained:
            await engine.read_sampling()
        self._engines[url] = engine

    def url_of(self, name: str) -> str:
        """Return the base URL of an engine.

        Raises :class:`NotFound` for an unknown name.
        """
        return self._named(name).base

    def _made(self, url: str, version: int) -> PooledEngine:
        base = engine_base(url)
        key = self._api_key if base in self._named_by_operator else None
        engine = PooledEngine(
            self._settings, base, api_key=key, version=version, lora=self._published_model
        )
        if self._shared:
            engine.name += f"/{self.policy}"
        return engine

    def _published_model(self) -> str | None:
        return self.gate.policy.model

    def _named(self, name: str) -> PooledEngine:
        for engine in self._engines.values():
            if name in (engine.name, engine.base):
                return engine
        raise NotFound(f"there is no engine {name}")


def _is_unreachable(fault: ApiError | str | None) -> bool:
    return isinstance(fault, ApiError) and fault.kind == "upstream_unreachable"


def _rank(engine: PooledEngine, session_id: str) -> bytes:
    """Return the engine's rank in the session's own order of engines.

    The order settles ties alike in every process.
    """
    text = f"{session_id} {engine.base}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
