"""One call to an upstream: an engine of a pool is chosen and asked, and its reply is followed.

While no byte of the reply has come, another engine may be asked instead. Subclasses read the reply:
:class:`bridle.proxy.engines.stream.EngineStream` as canonical events, and
:class:`bridle.proxy.engines.passed.PassedStream` as bytes that go to the client as they are.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, TypeVar

from bridle.proxy.engines.engine import PooledEngine
from bridle.proxy.engines.errors import CONNECTION_ERRORS, connection_error, refusal, without_keys
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.engines.request import EngineRequest
from bridle.proxy.engines.transport import ConnectionEpochOver, EngineResponse
from bridle.proxy.engines.weights import other_weights
from bridle.proxy.session.session import Session
from bridle.proxy.wire.canonical import ApiError
from bridle.proxy.wire.in_flight import Held
from bridle.proxy.wire.sse import EventTooLarge
from bridle.store.records import Note

Part = TypeVar("Part")
"""A part of a reply: a canonical event, or bytes for the client."""
Sink = Callable[[list[Part]], "asyncio.Future[Any] | None"]
"""A callback for the parts of one network read. It returns a future to await before more is read,
or ``None``."""

_UNANSWERED: Final = frozenset({502, 503})
"""Statuses of calls for which nothing was generated: the connection was refused, it was reset
before the first byte, or the engine itself is unavailable."""
_ANSWERED: Final = frozenset({400, 404, 413, 422, 429})
"""Statuses of a working engine that refuses this request."""
_PAUSES_S: Final = (0.05, 0.2, 0.8)
"""Seconds to wait before the same engine is asked again, by attempt."""
_NO_ROOM: Final = "max_tokens must be at least 1, got 0"
"""The refusal of vLLM for a prompt that fills the whole context, and for a client's own 0."""


class UpstreamCall(ABC, Generic[Part]):
    """The reply of one call: use :meth:`open`, :meth:`follow`, :meth:`close`, in this order."""

    def __init__(
        self,
        pool: EnginePool,
        request: EngineRequest,
        *,
        call_id: str,
        session: Session,
        notes: list[Note],
        held: Held,
    ) -> None:
        """Create the call.

        ``notes`` gets a note for each retry, and for the limit that ended the reply. ``held``
        counts the bytes of a whole reply.
        """
        self.engine: PooledEngine | None = None
        """The engine that was asked last."""
        self._pool = pool
        self._request = request
        self._call_id = call_id
        self._session = session
        self._notes = notes
        self._limits = pool.limits
        self._held = held
        self._own_keys = pool.own_keys
        self._sink: Sink[Part] = _ignored
        self._received = self._counted = 0
        """Bytes of the reply so far, and the number of them that ``held`` has counted."""
        self._response: EngineResponse | None = None
        self._running_at: PooledEngine | None = None
        """The engine that counts this call as running."""
        self._asked_name: str | None = None
        """The published model name that the engine was asked for, if one was published."""
        self._asked_version = 0
        """The engine's version when it was asked. A whole reply is stamped with the version at its
        arrival, because only a stream shows which of its tokens are older."""
        self._failure: ApiError | None = None
        self._broke_off = False
        """True if the reply ended before the engine had finished it."""
        self._over = False

    @abstractmethod
    def _arrived(self, chunk: bytes) -> asyncio.Future[Any] | None:
        """Take the bytes of one network read."""

    @abstractmethod
    def _rest(self) -> list[Part]:
        """Return the last parts of a reply whose bytes have all come."""

    @abstractmethod
    def _came(self) -> None:
        """Learn from a reply that came whole."""

    @property
    def version(self) -> int:
        """The policy version of the tokens that arrive now.

        An engine that serves each version under a name of its own (LoRA) answers a call with the
        version that it was asked for, whatever name is published meanwhile.
        """
        assert self.engine is not None, "open() first"  # noqa: S101 - a programming error
        if self._asked_name not in (None, self._pool.gate.policy.model):
            return self._asked_version
        return self.engine.serves.version

    async def open(self) -> None:
        """Send the request and return when an engine has taken it. Raises :class:`ApiError`."""
        tried: list[PooledEngine] = []
        fields = self._pool.upstream_fields
        may_learn = self._request.external and self._request.passed is None
        while True:
            engine = self._pool.choose(self._session.id, self._session.homes, tried)
            if engine in tried:
                await asyncio.sleep(_PAUSES_S[min(len(tried), len(_PAUSES_S)) - 1])
            model = await self._pool.model_name(engine, self._request.model)
            try:
                await self._ask(engine, model)
                return
            except ApiError as error:
                if may_learn and (learned := fields.learn(error, self._request)):
                    may_learn = False
                    self._notes.append(Note("upstream_fields_learned", learned))
                    continue
                tried.append(engine)
                if not self._may_retry(error, tried):
                    raise
                engine.retries += 1
                self._notes.append(Note("upstream_retry", f"{engine.name} {error.kind}"))

    async def follow(self, sink: Sink[Part]) -> None:
        """Pass the parts of the reply to ``sink`` and return when the reply is whole.

        The reply may come whole or streamed, whatever was asked for.

        Raises :class:`ApiError`, after all parts that came before the fault, and any exception
        that ``sink`` raises.
        """
        engine, response = self.engine, self._response
        assert engine is not None, "open() first"  # noqa: S101 - a programming error
        assert response is not None, "open() first"  # noqa: S101
        self._sink = sink
        try:
            await response.follow(self._arrived)
            # If no parts come, an error can still have a status of its own.
            if not self._over and (parts := self._rest()):
                sink(parts)
        except EventTooLarge:
            raise self.ended_by("event_bytes", self._limits.event_bytes) from None
        except CONNECTION_ERRORS as error:
            self._broke(error)
        if self._failure is not None:
            # What a reply says is no evidence against the engine: one agent's requests could
            # otherwise take it from all others.
            if self._broke_off and _is_failure(self._failure):
                engine.circuit.failed(session=self._session.id)
                engine.report(self._failure.message)
            raise self._failure
        if not engine.circuit.calm:
            engine.circuit.succeeded()
        self._came()
        version = self.version
        if version != self._asked_version and not self._request.stream:
            self._notes.append(Note("version_changed_midway", f"{self._asked_version} {version}"))

    def _broke(self, error: Exception) -> None:
        """Record that the connection broke within the reply."""
        self._failure = connection_error(error)
        self._broke_off = True

    def close(self) -> None:
        """Close the connection unless the reply is over; the engine then stops generating."""
        if self._response is not None and (self._failure is not None or not self._over):
            self._response.close()
        # The sink is the call's, which holds this stream: a cycle would keep both for long.
        self._sink = _ignored
        engine, self._running_at = self._running_at, None
        if engine is not None:
            engine.running -= 1
            if engine.removed:
                engine.left()

    async def _ask(self, engine: PooledEngine, model: str) -> None:
        circuit, request = engine.circuit, self._request
        body = request.body(model, self._pool.upstream_fields)
        path, headers = request.path, f"x-request-id: {self._call_id}\r\n"
        credentials = None
        if request.passed is not None:
            path, credentials = request.passed.path(model), request.passed.credentials
            headers += request.passed.headers
        trial = not circuit.calm and circuit.begin()
        self.engine = self._running_at = engine
        self._asked_version = engine.serves.version
        self._asked_name = model if model == self._pool.gate.policy.model else None
        engine.running += 1
        send = partial(
            engine.transport.request, "POST", path, *body, headers=headers, key_header=credentials
        )
        try:
            epoch = engine.serves.connection_epoch
            try:
                self._response = await send(connection_epoch=epoch)
            except ConnectionEpochOver:
                await engine.serves.compare()
                if engine.serves.changed:
                    raise other_weights(engine.serves.version) from None
                self._response = await send()
            if self._response.status != 200:
                raise await self._refused(self._response)
        except ApiError as error:
            self._unanswered(engine, error, trial)
            raise
        except CONNECTION_ERRORS as error:
            failure = connection_error(error)
            self._unanswered(engine, failure, trial)
            raise failure from error
        except BaseException:
            circuit.abandoned(trial)
            raise
        if not circuit.calm:
            circuit.answered()
            engine.report()

    def _unanswered(self, engine: PooledEngine, error: ApiError, trial: bool) -> None:
        """Record that the engine did not take the call."""
        if error.status in _ANSWERED:
            engine.circuit.answered()
            engine.circuit.succeeded()
        elif _is_failure(error) and not engine.serves.changed:
            away = error.kind == "upstream_unreachable"
            engine.circuit.failed(trial, None if away else self._session.id)
        else:
            engine.circuit.abandoned(trial)
        self.close()
        self._response = None
        engine.report(error)

    async def _refused(self, response: EngineResponse) -> ApiError:
        refused = await refusal(response, self._own_keys)
        if _NO_ROOM in refused.message and self._request.sampling.get("max_tokens") != 0:
            return ApiError(
                "context_overflow", "The prompt leaves no room for a reply.", status=400
            )
        return refused

    def _may_retry(self, error: ApiError, tried: list[PooledEngine]) -> bool:
        """Return True if the call may be tried again.

        An engine that sent a time to wait is not asked again, but another one may be. A refusal
        that the client gets as it is, is the client's to repeat.
        """
        if error.passed is not None or error.status not in _UNANSWERED:
            return False
        if len(tried) > self._limits.retries:
            return False
        usable = self._pool.usable_engines()
        others = [engine for engine in usable if engine not in tried]
        return bool(others or (usable and error.retry_after is None))

    def hold(self, count: int) -> None:
        """Count bytes of the reply that are kept in memory.

        Raises :class:`ApiError` if the running calls hold too many.
        """
        try:
            self._held.add(count)
        except ApiError:
            self._notes.append(Note("limit_in_flight_bytes", f"{self._held.bytes} bytes"))
            raise

    def ended_by(self, limit: str, size: int) -> ApiError:
        """Note that the reply is larger than a limit allows, and return the error that ends it."""
        unit = limit.rpartition("_")[2]
        self._notes.append(Note(f"limit_{limit}", f"more than {size} {unit}"))
        message = f"the engine's reply is larger than {size} {unit} ({limit})"
        return ApiError("upstream_error", message, status=502)

    def _cleaned(self, payload: bytes) -> bytes:
        """Return the payload without the proxy's own keys, and note their removal."""
        if not any([key in payload for key in self._own_keys]):
            return payload
        if (note := Note("key_removed")) not in self._notes:
            self._notes.append(note)
        return without_keys(payload, self._own_keys)


def _is_failure(error: ApiError) -> bool:
    """Return True if ``error`` is evidence against the engine and not against the request."""
    return error.status in _UNANSWERED or error.kind == "upstream_timeout"


def _ignored(_: list[Any]) -> None:
    """Ignore the parts of a reply that nobody follows."""
