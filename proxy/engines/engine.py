"""One engine of a pool: its connections, its state, and the requests to it besides calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from bridle.engine.contract.contract import (
    HEALTH,
    MODELS,
    SERVER_INFO,
    TOKENIZE,
    VERSION,
    WEIGHT_INFO,
)
from bridle.proxy.engines.circuit import Circuit, CircuitState
from bridle.proxy.engines.errors import CONNECTION_ERRORS, connection_error, refusal, without_keys
from bridle.proxy.engines.transport import EngineConnections
from bridle.proxy.engines.weights import UNKNOWN, EngineSampling, ServedWeights
from bridle.proxy.settings import ProxySettings
from bridle.proxy.wire.canonical import ApiError, Request

log = logging.getLogger("bridle.proxy")

_MODELS_FRESH_S: Final = 30.0
_HEALTH_TIMEOUT_S: Final = 15.0
"""A long timeout, because an engine that is loading weights or compiling is busy, not gone."""
_SAMPLING_TIMEOUT_S: Final = 2.0
_FINGERPRINTS: Final = ((VERSION, "weights_fingerprint"), (WEIGHT_INFO, "weight_version"))
"""The routes and fields in which engines report their weights: first our own engines', then
vLLM's."""
_NO_ROUTE: Final = frozenset({404, 405, 501})


class EngineRendering:
    """The results of comparing one engine's prompts with the local rendering.

    See :mod:`bridle.proxy.engines.rendering`.
    """

    __slots__ = ("_differed_in", "_period", "_shapes", "agrees", "difference")

    def __init__(self) -> None:
        self.agrees = False
        """True if at least one prompt was compared and every compared prompt equals the local
        rendering."""
        self.difference = ""
        """A description of how a prompt differed; empty if none did. Calls are not continued
        exactly while it is set."""
        self._period: Hashable = None
        self._shapes: set[Hashable] = set()
        """The shapes of prompts that were compared in the current period."""
        self._differed_in: Hashable = None

    def due(self, period: Hashable, shape: Hashable) -> bool:
        """Return True for the first prompt of a shape in a period.

        A period ends when the engine may have got another template.
        """
        if period != self._period:
            self._period, self._shapes = period, set()
        seen = len(self._shapes)
        self._shapes.add(shape)
        return len(self._shapes) > seen

    def found(self, difference: str, period: Hashable) -> None:
        """Record a comparison.

        ``difference`` is empty if the prompts are equal. After a difference, equal prompts count
        only in another period.
        """
        if difference:
            self.difference, self.agrees, self._differed_in = difference, False, period
        elif not self.difference or period != self._differed_in:
            self.difference, self.agrees = "", True


class PooledEngine:
    """One engine of a pool. Create it inside the event loop that uses it."""

    def __init__(
        self,
        settings: ProxySettings,
        base: str,
        *,
        api_key: str | None = None,
        version: int = 0,
        lora: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Create the engine without a connection.

        ``base`` is its URL without ``/v1``; ``version`` is the policy version that it serves.
        ``lora`` returns the name of the LoRA adapter that was published as this version, if any.
        Raises ``ValueError`` if ``base`` is not an HTTP URL.
        """
        limits = settings.limits
        self.base = base
        self.name = urlsplit(base).netloc.rpartition("@")[2]
        """Host and port, and the policy if the engine serves several; for operators, never for
        clients."""
        self.transport = EngineConnections(
            base,
            api_key=api_key,
            limit=limits.max_connections,
            connect_timeout_s=limits.connect_timeout_s,
            stall_timeout_s=limits.stall_timeout_s,
        )
        self.circuit = Circuit(limits.failures_to_eject)
        self.serves = ServedWeights(self.name, self.read_fingerprint, version)
        self._lora = lora
        self.rendering = EngineRendering()
        self.running = 0
        """Number of calls that it serves. Add 1 for a call. When the call is over, subtract 1, and
        call :meth:`left` if the engine has been removed."""
        self.removed = False
        """True if it has been taken out of its pool."""
        self.retries = 0
        """Number of calls that were retried after this engine failed them."""
        self.fault: ApiError | str | None = None
        """The latest failure of a call or a health check; ``None`` once either has succeeded."""
        self.own_keys = settings.own_keys
        """The proxy's own keys, which are removed from everything that the engine sends."""
        self.names: Sequence[str] = ()
        """The names of the engine's models, as it listed them last."""
        self.names_until = float("-inf")
        """The value of ``time.monotonic()`` at which ``names`` is too old."""
        self.names_epoch = 0
        """The connection epoch in which ``names`` was read: a restarted engine may have others."""
        self.sampling = UNKNOWN
        """The engine's own sampling, as it reported when :meth:`read_sampling` was last awaited."""
        self._sampling_epoch = -1
        """The connection epoch in which ``sampling`` was read: a restarted engine may differ."""
        self._models: tuple[dict[str, Any], ...] = ()
        self._ejected = False
        """True if the last report was that the circuit has opened."""
        self._left = asyncio.Event()

    @property
    def version(self) -> int:
        """The policy version of the tokens that arrive from it."""
        return self.serves.version

    def left(self) -> None:
        """Wake :meth:`retired` after a running call is over."""
        self._left.set()

    async def retired(self) -> None:
        """Wait until no call runs there any more, then close its connections."""
        while self.running:
            self._left.clear()
            await self._left.wait()
        await self.transport.close()

    def report(self, cause: ApiError | str | None = None) -> None:
        """Log that the circuit has opened or closed since the last report, if it has.

        ``cause`` is the latest failure; it is kept as the engine's ``fault``.
        """
        self.fault = cause
        closed = self.circuit.state is CircuitState.CLOSED
        if closed and self._ejected:
            log.info("engine_readmitted", extra={"engine": self.name})
        elif not closed and not self._ejected:
            extra = {"engine": self.name, "cause": cause and str(cause)}
            log.warning("engine_ejected", extra=extra)
        self._ejected = not closed

    # -- requests besides calls ------------------------------------------------------------------

    async def models(self) -> tuple[dict[str, Any], ...]:
        """Return the engine's model cards, or the last known ones while it does not answer.

        Raises :class:`ApiError` if they could never be read.
        """
        try:
            self._models = await self._read_models()
        except ApiError:
            if not self._models:
                raise
        else:
            self.names = [str(card["id"]) for card in self._models]
            self.names_until = time.monotonic() + _MODELS_FRESH_S
            self.names_epoch = self.transport.connection_epoch
        return self._models

    async def _read_models(self) -> tuple[dict[str, Any], ...]:
        with _reading("the engine's model list"):
            response = await self.transport.request("GET", MODELS)
            body = without_keys(await response.read(), self.own_keys)
            cards = orjson.loads(body)["data"]
            return tuple(card for card in cards if "id" in card)

    async def count_tokens(self, request: Request, model: str) -> int:
        """Return the number of prompt tokens that the engine's own template makes of ``request``.

        Raises :class:`ApiError` if the engine cannot count them.
        """
        body: dict[str, Any] = {
            "model": model,
            "messages": [message.to_chat() for message in request.messages],
            "add_generation_prompt": True,
        }
        if request.tools:
            body["tools"] = request.tools
        if arguments := request.template_arguments:
            body["chat_template_kwargs"] = arguments
        if request.extra.get("continue_final_message"):
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        with _reading("the engine's token count"):
            response = await self.transport.request("POST", TOKENIZE, orjson.dumps(body))
            if response.status != 200:
                raise await refusal(response, self.own_keys)
            return int(orjson.loads(await response.read())["count"])

    async def tokenize(
        self,
        messages: Sequence[Mapping[str, Any]],
        model: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int] | None:
        """Return the ids that the engine makes of ``messages`` and the beginning of a reply.

        Return ``None`` if the engine refuses them or does not report ids. Raises :class:`ApiError`.
        """
        body = {"model": model, "messages": messages, "add_generation_prompt": True}
        if tools:
            body["tools"] = tools
        with _reading("the engine's token ids"):
            response = await self.transport.request("POST", TOKENIZE, orjson.dumps(body))
            if response.status != 200:
                failure = await refusal(response, self.own_keys)
                if failure.status < 500 or response.status in _NO_ROUTE:
                    return None
                raise failure
            ids: list[int] | None = orjson.loads(await response.read()).get("tokens")
            return ids

    async def check_health(self) -> ApiError | str | None:
        """Return the reason why the engine is not healthy, or ``None`` if it is.

        An engine whose health route is missing or closed is healthy while it answers at all: its
        calls show what it cannot do.
        """
        try:
            response = await self.transport.request("GET", HEALTH, timeout_s=_HEALTH_TIMEOUT_S)
            await response.read()
        except CONNECTION_ERRORS as error:
            return connection_error(error)
        if response.status >= 500 and response.status not in _NO_ROUTE:
            return f"{HEALTH} answers {response.status}"
        return None

    async def read_fingerprint(self) -> tuple[str | None, int]:
        """Return the fingerprint of the weights that the engine serves, and the connection epoch.

        The fingerprint is ``None`` if the engine has none. The epoch is the one in which it was
        read. Of a LoRA adapter it is the path that the engine lists: an engine that was restarted
        lists none.

        Raises :class:`ApiError` if it could not be read.
        """
        if (name := self._lora()) is not None:
            cards = await self._read_models()
            card = next((card for card in cards if card["id"] == name), None)
            if card is None:
                return None, self.transport.connection_epoch
            if card.get("parent") is not None:
                return f"{name} {card.get('root')}", self.transport.connection_epoch
        for path, name in _FINGERPRINTS:
            with _reading("the engine's report of its weights"):
                report = await self._get(path)
                if isinstance(report, dict) and isinstance(fingerprint := report.get(name), str):
                    return fingerprint, self.transport.connection_epoch
        return None, self.transport.connection_epoch

    @property
    def sampling_known(self) -> bool:
        """Return whether ``sampling`` was reported by the engine that is connected."""
        return self._sampling_epoch == self.transport.connection_epoch

    async def read_sampling(self) -> None:
        """Read how the engine samples.

        If the engine reports nothing, or not in time, its sampling is unknown.
        """
        found = None
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(_SAMPLING_TIMEOUT_S):
                found = await self._reported_sampling()
                self._sampling_epoch = self.transport.connection_epoch
        self.sampling = found or UNKNOWN

    async def _reported_sampling(self) -> EngineSampling | None:
        with _reading("the engine's way of sampling"):
            found = EngineSampling.reported(await self._get(VERSION))
            if found is None:
                report = await self._get(SERVER_INFO)
                config = report.get("vllm_config") if isinstance(report, dict) else None
                if isinstance(config, dict):
                    found = EngineSampling.reported(
                        config.get("model_config"), config.get("structured_outputs_config")
                    )
            return found

    async def _get(self, path: str) -> Any:
        """Return the JSON that the engine answers, or ``None`` if it has no such route."""
        response = await self.transport.request("GET", path)
        try:
            body = await response.read()
        finally:
            response.close()
        if response.status in _NO_ROUTE:
            return None
        if response.status != 200:
            raise ValueError(f"{path} answered {response.status}")
        return orjson.loads(body)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Convert the failures of reading ``what`` from the engine to :class:`ApiError`."""
    try:
        yield
    except CONNECTION_ERRORS as error:
        raise connection_error(error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ApiError("upstream_error", f"{what} cannot be read", status=502) from error
