"""The engines that serve one model, and the choice of one of them for each call.

A session stays with its engine, whose prefix cache holds its history; a new session goes to the
engine with the fewest running calls. An engine gets no calls while its circuit is open, while it
serves another policy version than the pool's (its tokens would be stale although nobody has decided
so), and while it reports other weights than those published to it
(:mod:`bridle.proxy.engines.served_weights`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from bridle.proxy.engines.assistant_fields import AssistantFields
from bridle.proxy.engines.circuit import Circuit, CircuitState
from bridle.proxy.engines.endpoint import EngineEndpoint
from bridle.proxy.engines.policy_gate import PolicyGate
from bridle.proxy.engines.rendering import EngineRendering
from bridle.proxy.engines.served_weights import ServedWeights, other_weights
from bridle.proxy.periodic import Periodic
from bridle.proxy.settings import ProxySettings, engine_base
from bridle.proxy.wire.canonical import ApiError, Request
from bridle.store.errors import NotFound
from bridle.store.operations.gates import Served

log = logging.getLogger("bridle.proxy")

_SHORTEST_RETRY_S: Final = 1.0

Answer = TypeVar("Answer")
Fingerprints = Mapping[str, str | None]
"""The weights fingerprints that engines reported, by base URL."""


class PooledEngine:
    """One engine: its connections, its circuit, and what it serves."""

    def __init__(self, endpoint: EngineEndpoint, circuit: Circuit, version: int) -> None:
        self.endpoint = endpoint
        self.name = urlsplit(endpoint.base).netloc.rpartition("@")[2]
        """Host and port; for operators, never for clients."""
        self.circuit = circuit
        self.serves = ServedWeights(endpoint, self.name, version)
        self.rendering = EngineRendering()
        self.running = 0
        """Number of calls that it serves. Add 1 for a call, and call :meth:`leave` when the call is
        over."""
        self.removed = False
        """Whether it has been taken out of its pool."""
        self.retries = 0
        """Number of calls that were retried after this engine failed them."""
        self.fault: ApiError | str | None = None
        """The latest failure of a call or a health check; ``None`` once either has succeeded."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def version(self) -> int:
        """The policy version of the tokens that arrive from it."""
        return self.serves.version

    def leave(self) -> None:
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def retired(self) -> None:
        """Wait until no call runs there any more, then close its connections."""
        while self.running:
            self._idle.clear()
            await self._idle.wait()
        await self.endpoint.close()


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
        gate: PolicyGate,
        urls: Sequence[str],
        *,
        model: str | None = None,
        api_key: str | None = None,
        external: bool = False,
        trained: bool = False,
    ) -> None:
        """Create the pool; no engine is asked yet.

        ``model`` is the model name that the engines are asked for. With ``None`` it is the client's
        if the engines list it, else the first that they list. ``external`` is true for the engines
        of another provider, which have no health route and are asked for the client's model name
        unless ``model`` is given. ``api_key`` is sent to the engines of ``urls``, never to an
        engine that is added later. ``trained`` is true if the tokens of these engines may be
        trained. They are then asked how they sample: at the start, and after connections to them
        have broken.
        """
        self.gate = gate
        self.model = model
        self.assistant_fields = AssistantFields()
        self._settings = settings
        self.own_keys = settings.own_keys
        """The proxy's own keys, which are removed from everything that the engines send."""
        self.external = external
        self._trained = trained
        self._api_key = api_key
        self._named_by_operator = frozenset(engine_base(url) for url in urls)
        self._engines: dict[str, PooledEngine] = {}
        for url in urls:
            engine = self._made(url, gate.version)
            self._engines[engine.endpoint.base] = engine
        self._checks = Periodic("engine-health", settings.limits.health_check_s, self.check)

    async def start(self) -> None:
        for engine in self._engines.values():
            await engine.endpoint.start()
        if self._trained:
            await asyncio.gather(*(one.endpoint.read_sampling() for one in self._engines.values()))
        if not self.external and self._settings.limits.health_check_s > 0:
            self._checks.start()

    async def close(self) -> None:
        await self._checks.close()
        for engine in self._engines.values():
            await engine.endpoint.close()

    # -- choosing --------------------------------------------------------------------------------

    def choose(
        self, session_id: str, homes: Homes, avoid: Collection[PooledEngine] = ()
    ) -> PooledEngine:
        """Return the engine for the session's next call: the one in ``homes`` while it is usable,
        else another one, which is put into ``homes``. An engine in ``avoid`` is chosen only if no
        other is left.

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
        """Set the version that was published to each engine; ``served`` has the engines' rows by
        base URL. Take the engines without a row out of the pool, and return them. An engine that is
        not in the pool yet has to be added (:meth:`add`)."""
        removed = [one for url, one in self._engines.items() if url not in served]
        for engine in removed:
            del self._engines[engine.endpoint.base]
            engine.removed = True
        for url, one in self._engines.items():
            one.serves.set_row(served[url])
        return removed

    def urls(self) -> set[str]:
        """Return the base URLs of the engines."""
        return set(self._engines)

    async def learn_fingerprints(self, engine: str | None = None) -> Fingerprints:
        """Ask ``engine`` (every engine if ``None``) for the fingerprint of the weights that were
        just published. Return the fingerprints by base URL. Raises :class:`NotFound` for an unknown
        engine."""
        meant = self._meant(engine)
        fingerprints = await asyncio.gather(*(one.serves.learn() for one in meant))
        return {
            one.endpoint.base: fingerprint
            for one, fingerprint in zip(meant, fingerprints, strict=True)
        }

    def _meant(self, engine: str | None) -> list[PooledEngine]:
        return list(self._engines.values()) if engine is None else [self._named(engine)]

    async def models(self) -> tuple[dict[str, Any], ...]:
        """Return the model cards of one engine, a usable one if there is any. Raises
        :class:`ApiError`."""
        return await self._any(lambda one: one.endpoint.models())

    def known_model(self, engine: PooledEngine, requested: str) -> str | None:
        """Return the engine's name for the model that a client asked for, or ``None`` if the
        engine's list of models has to be read first (:meth:`read_model`).

        A model name that the engine does not know stands for the policy.
        """
        if self.external:
            return self.model or requested
        named = self._settings.model_aliases.get(requested) or self.gate.policy.model or self.model
        if named is not None:
            return named
        endpoint = engine.endpoint
        if not endpoint.transport.any_open or time.monotonic() > endpoint.names_until:
            return None
        if endpoint.transport.connection_epoch != endpoint.names_epoch or not endpoint.names:
            return None
        return requested if requested in endpoint.names else endpoint.names[0]

    async def read_model(self, engine: PooledEngine, requested: str) -> str:
        """Read the engine's list of models and return its name for the model. If the list cannot be
        read, return ``requested``: the call itself will meet the same fault and is recorded with
        it. Raises :class:`ApiError` if the engine serves no model yet."""
        try:
            cards = await engine.endpoint.models()
        except ApiError as error:
            if not error.kind.startswith("upstream_"):
                raise
            return requested
        names = [str(card["id"]) for card in cards]
        if not names:
            raise ApiError("overloaded", "the engine serves no model yet", status=503)
        return requested if requested in names else names[0]

    async def count_tokens(self, request: Request) -> tuple[int, str]:
        """Return the number of prompt tokens that the engines' own template makes of ``request``,
        and the model name that the engine was asked for."""

        async def count(engine: PooledEngine) -> tuple[int, str]:
            model = await self._model(engine, request.model)
            return await engine.endpoint.count_tokens(request, model), model

        return await self._any(count)

    async def tokenize(
        self,
        messages: Sequence[Mapping[str, Any]],
        requested: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int] | None:
        """See :meth:`bridle.proxy.engines.endpoint.EngineEndpoint.tokenize`."""

        async def ids(engine: PooledEngine) -> list[int] | None:
            model = await self._model(engine, requested)
            return await engine.endpoint.tokenize(messages, model, tools)

        return await self._any(ids)

    async def _model(self, engine: PooledEngine, requested: str) -> str:
        return self.known_model(engine, requested) or await self.read_model(engine, requested)

    async def _any(self, ask: Callable[[PooledEngine], Awaitable[Answer]]) -> Answer:
        """Return the answer of the first engine that can be reached. The first engine is asked a
        second time at the end, because a pooled connection to it may have died."""
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
                url=one.endpoint.base,
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
        before = engine.circuit.state
        fault = await engine.endpoint.fault()
        well = fault is None
        if well:
            # Before its circuit admits calls again. One that cannot say now is asked before a call.
            with contextlib.suppress(ApiError):
                await engine.serves.compare()
            if self._trained and not engine.endpoint.sampling_known:
                await engine.endpoint.read_sampling()
        engine.circuit.checked(well)
        report(engine, before, fault)
        return well and self.usable(engine)

    # -- membership ------------------------------------------------------------------------------

    async def add(self, url: str) -> None:
        """Add an engine. It gets no call before its version is set."""
        engine = self._made(url, -1)
        await engine.endpoint.start()
        if self._trained:
            await engine.endpoint.read_sampling()
        self._engines[url] = engine

    def url_of(self, name: str) -> str:
        """Return the base URL of an engine. Raises :class:`NotFound` for an unknown
        name."""
        return self._named(name).endpoint.base

    def _made(self, url: str, version: int) -> PooledEngine:
        base = engine_base(url)
        key = self._api_key if base in self._named_by_operator else None
        endpoint = EngineEndpoint(self._settings, base, key)
        circuit = Circuit(self._settings.limits.failures_to_eject)
        return PooledEngine(endpoint, circuit, version)

    def _named(self, name: str) -> PooledEngine:
        for engine in self._engines.values():
            if name in (engine.name, engine.endpoint.base):
                return engine
        raise NotFound(f"there is no engine {name}")


def report(engine: PooledEngine, before: CircuitState, cause: ApiError | str | None = None) -> None:
    """Log the change of the engine's circuit since ``before``, if there was one. ``cause`` is the
    latest failure; it is kept as the engine's ``fault``."""
    engine.fault = cause
    after = engine.circuit.state
    if after is before:
        return
    if after is CircuitState.OPEN and before is CircuitState.CLOSED:
        log.warning("engine_ejected", extra={"engine": engine.name, "cause": cause and str(cause)})
    elif after is CircuitState.CLOSED:
        log.info("engine_readmitted", extra={"engine": engine.name})


def _is_unreachable(fault: ApiError | str | None) -> bool:
    return isinstance(fault, ApiError) and fault.kind == "upstream_unreachable"


def _rank(engine: PooledEngine, session_id: str) -> bytes:
    """Return the engine's rank in the session's own order of engines, which settles ties alike in
    every process."""
    text = f"{session_id} {engine.endpoint.base}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
