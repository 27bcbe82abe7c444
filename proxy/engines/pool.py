"""The engines that serve one model, and which of them a call goes to.

A session stays with its engine, whose prefix cache holds its history; a new session goes where the
fewest calls run. An engine is left out while its circuit is open, while the policy version that it
serves is not the pool's (its tokens would be stale without anybody having decided so), and while it
says itself that it serves other weights (:mod:`bridle.proxy.engines.served_weights`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from bridle.proxy.engines.circuit import Circuit, CircuitState
from bridle.proxy.engines.policy_gate import PolicyGate
from bridle.proxy.engines.served_weights import ServedWeights, other_weights
from bridle.proxy.engines.upstream import Upstream
from bridle.proxy.periodic import Periodic
from bridle.proxy.settings import ProxySettings
from bridle.proxy.wire.canonical import ApiError, Request

log = logging.getLogger("bridle.proxy")

_SHORTEST_RETRY_S: Final = 1.0
_HOMES_KEPT: Final = 4096

Answer = TypeVar("Answer")
Fingerprints = Mapping[str, str | None]
"""What engines say of their weights, by base URL."""


class PooledEngine:
    """One engine: its connections, its circuit, and what it serves."""

    def __init__(self, upstream: Upstream, circuit: Circuit, version: int) -> None:
        self.upstream = upstream
        self.name = urlsplit(upstream.base).netloc.rpartition("@")[2]
        """Host and port; for operators, never for clients."""
        self.circuit = circuit
        self.serves = ServedWeights(upstream, self.name, version)
        self.running = 0
        self.retries = 0
        """Calls that went on to another try after this engine failed them."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def version(self) -> int:
        """Policy version of the tokens that arrive from it."""
        return self.serves.version

    def enter(self) -> None:
        """A call goes to it; pair with :meth:`leave`."""
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def retired(self) -> None:
        """Closes its connections when no call runs there any more."""
        while self.running:
            await self._idle.wait()
        await self.upstream.close()


class EngineState(msgspec.Struct, frozen=True):
    """What the pool knows of one engine."""

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


class EnginePool:
    """Start it inside the event loop that uses it."""

    def __init__(
        self,
        settings: ProxySettings,
        gate: PolicyGate,
        urls: Sequence[str],
        *,
        model: str | None = None,
        api_key: str | None = None,
        checked: bool = True,
    ) -> None:
        """``model`` is the name to ask these engines for; ``None``: the first that they list.
        ``checked``: they have a health route."""
        self.gate = gate
        self.model = model
        self._settings = settings
        self._checked = checked
        self._api_key = api_key
        self._engines: dict[str, PooledEngine] = {}
        for url in urls:
            engine = self._made(url, gate.version)
            self._engines[engine.upstream.base] = engine
        self._homes: OrderedDict[str, PooledEngine] = OrderedDict()
        """Session id -> the engine that it stays with."""
        self._checks = Periodic("engine-health", settings.limits.health_check_s, self.check)

    async def start(self) -> None:
        for engine in self._engines.values():
            await engine.upstream.start()
        if self._checked and self._settings.limits.health_check_s > 0:
            self._checks.start()

    async def close(self) -> None:
        await self._checks.close()
        for engine in self._engines.values():
            await engine.upstream.close()

    # -- choosing --------------------------------------------------------------------------------

    def choose(self, session_id: str | None, avoid: Collection[PooledEngine] = ()) -> PooledEngine:
        """The engine for the session's next call; ``avoid`` is asked only when no other is left.

        Raises :class:`ApiError` (503) when none is usable.
        """
        if session_id is not None and (home := self._homes.get(session_id)) is not None:
            self._homes.move_to_end(session_id)
            if home not in avoid and self.usable(home):
                return home
        usable = self.usable_engines()
        if not usable:
            raise self._none_usable()
        fresh = [engine for engine in usable if engine not in avoid]
        chosen = min(fresh or usable, key=lambda one: (one.running, _rank(one, session_id)))
        if session_id is not None:
            self._homes[session_id] = chosen
            while len(self._homes) > _HOMES_KEPT:
                self._homes.popitem(last=False)
        return chosen

    def usable_engines(self) -> list[PooledEngine]:
        return [engine for engine in self._engines.values() if self.usable(engine)]

    def usable(self, engine: PooledEngine) -> bool:
        serves = engine.serves
        current = serves.version == self.gate.version and not serves.changed
        return current and engine.circuit.admits

    def _none_usable(self) -> ApiError:
        behind = [one for one in self._engines.values() if one.circuit.admits]
        if any(one.version == self.gate.version for one in behind):
            return other_weights(self.gate.version)
        waits = [one.circuit.retry_after for one in self._engines.values() if one not in behind]
        what = (
            f"no engine serves policy version {self.gate.version} yet"
            if behind
            else "no engine is healthy"
        )
        return ApiError(
            "overloaded",
            what,
            status=503,
            retry_after=max(_SHORTEST_RETRY_S, min(waits, default=_SHORTEST_RETRY_S)),
        )

    # -- what the engines serve ------------------------------------------------------------------

    def published(
        self,
        version: int,
        engine: str | None = None,
        fingerprints: Fingerprints = MappingProxyType({}),
    ) -> None:
        """``engine`` (all when ``None``) serves ``version`` from now on; ``fingerprints`` are
        what engines have reported for it already. Raises ``KeyError``."""
        for one in self._meant(engine):
            one.serves.published(version, fingerprints.get(one.upstream.base))

    def publishes(self) -> dict[str, int]:
        """How often each engine was published to, by base URL."""
        return {url: one.serves.publishes for url, one in self._engines.items()}

    async def learn_fingerprints(self, engine: str | None = None) -> Fingerprints:
        """What ``engine`` (all when ``None``) says of the weights that were just published, by base
        URL. Raises ``KeyError``."""
        meant = self._meant(engine)
        fingerprints = await asyncio.gather(*(one.serves.learn() for one in meant))
        return {
            one.upstream.base: fingerprint
            for one, fingerprint in zip(meant, fingerprints, strict=True)
        }

    def _meant(self, engine: str | None) -> list[PooledEngine]:
        return list(self._engines.values()) if engine is None else [self._named(engine)]

    async def models(self) -> tuple[dict[str, Any], ...]:
        """Model cards of an engine, a usable one if there is any. Raises :class:`ApiError`."""
        return await self._any(lambda one: one.upstream.models())

    async def served_model(self, requested: str) -> str:
        """The engines' name for the model that a client asked for.

        Whatever else a harness calls its model, it gets the policy. Raises :class:`ApiError`.
        """
        aliases = self._settings.model_aliases
        named = aliases.get(requested) or self.gate.policy.model or self.model
        if named is not None:
            return named
        served = [card["id"] for card in self._fresh_models() or await self.models()]
        if not served:
            raise ApiError("overloaded", "the engine serves no model yet", status=503)
        return requested if requested in served else str(served[0])

    def _fresh_models(self) -> tuple[dict[str, Any], ...]:
        for engine in self._engines.values():
            if self.usable(engine):
                return engine.upstream.fresh_models
        return ()

    async def count_tokens(self, request: Request, model: str) -> int:
        """How many prompt tokens the engines' own template makes of ``request``."""
        return await self._any(lambda one: one.upstream.count_tokens(request, model))

    async def tokenize(self, messages: Sequence[Mapping[str, Any]], model: str) -> list[int] | None:
        """See :meth:`proxy.upstream.Upstream.tokenize`."""
        return await self._any(lambda one: one.upstream.tokenize(messages, model))

    async def _any(self, ask: Callable[[PooledEngine], Awaitable[Answer]]) -> Answer:
        """What the first engine says that can be reached; the same one is asked again when a
        pooled connection to it had died."""
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
                url=one.upstream.base,
                circuit=one.circuit.state,
                policy_version=one.version,
                changed=one.serves.changed,
                usable=self.usable(one),
                running=one.running,
                retries=one.retries,
                ejections=one.circuit.openings,
                changes=one.serves.changes,
            )
            for one in self._engines.values()
        ]

    async def check(self) -> bool:
        """Asks every engine how it is; whether one may be used and is well."""
        engines = list(self._engines.values())
        return any(await asyncio.gather(*map(self._check, engines)))

    async def _check(self, engine: PooledEngine) -> bool:
        before = engine.circuit.state
        well = await engine.upstream.healthy()
        if well:
            # Before its circuit admits calls again. One that cannot say now is asked before a call.
            with contextlib.suppress(ApiError):
                await engine.serves.compare()
        engine.circuit.checked(well)
        report(engine, before)
        return well and self.usable(engine)

    # -- membership ------------------------------------------------------------------------------

    async def add(
        self, url: str, version: int, fingerprint: str | None = None
    ) -> PooledEngine | None:
        """One engine more, which serves ``version``; ``None`` when it is known.

        Raises ``ValueError`` for a URL that is none of HTTP."""
        if _base(url) in self._engines:
            return None
        engine = self._made(url, version)
        engine.serves.published(version, fingerprint)
        await engine.upstream.start()
        self._engines[engine.upstream.base] = engine
        return engine

    async def remove(self, name: str) -> None:
        """No further call goes to the engine; returns when the running ones have ended. Raises as
        :meth:`take_out` does."""
        await self.take_out(name).retired()

    def take_out(self, name: str) -> PooledEngine:
        """No further call goes to the engine. Raises ``KeyError`` for an unknown name and
        ``ValueError`` for the last engine."""
        engine = self._named(name)
        if len(self._engines) == 1:
            raise ValueError("the last engine cannot be removed")
        del self._engines[engine.upstream.base]
        for session_id in [key for key, home in self._homes.items() if home is engine]:
            del self._homes[session_id]
        return engine

    def _made(self, url: str, version: int) -> PooledEngine:
        upstream = Upstream(self._settings, _base(url), self._api_key)
        circuit = Circuit(self._settings.limits.failures_to_eject)
        return PooledEngine(upstream, circuit, version)

    def _named(self, name: str) -> PooledEngine:
        for engine in self._engines.values():
            if name in (engine.name, engine.upstream.base):
                return engine
        raise KeyError(name)


def report(engine: PooledEngine, before: CircuitState) -> None:
    """Logs how the engine's circuit changed since ``before``, if it did."""
    after = engine.circuit.state
    if after is before:
        return
    if after is CircuitState.OPEN and before is CircuitState.CLOSED:
        log.warning("engine_ejected", extra={"engine": engine.name})
    elif after is CircuitState.CLOSED:
        log.info("engine_readmitted", extra={"engine": engine.name})


def _base(url: str) -> str:
    """An engine's base URL without ``/v1``."""
    return url.rstrip("/").removesuffix("/v1")


def _rank(engine: PooledEngine, session_id: str | None) -> bytes:
    """Settles ties alike in every process: each session has its own order of engines."""
    text = f"{session_id} {engine.upstream.base}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
