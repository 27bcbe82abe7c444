"""A call's reply from a pool of engines, as batches of canonical events.

The engine is chosen when the call is sent, and the model is then named as that engine names it.
While no byte of the reply has come, another engine may be asked instead. Whole replies and streams
take the same path: a whole reply is one batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from bridle.proxy.engines.engine import PooledEngine
from bridle.proxy.engines.errors import CONNECTION_ERRORS, connection_error, refusal, without_keys
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.engines.reply import ReplyDecoder
from bridle.proxy.engines.request import EngineRequest
from bridle.proxy.engines.transport import ConnectionEpochOver, EngineResponse
from bridle.proxy.engines.weights import other_weights
from bridle.proxy.session.session import Session
from bridle.proxy.wire.canonical import ApiError, Event
from bridle.proxy.wire.in_flight import STEP, Held
from bridle.proxy.wire.sse import EventTooLarge, SseParser
from bridle.store.records import Note

Sink = Callable[[list[Event]], "asyncio.Future[Any] | None"]
"""A callback for the events of one network read. It returns a future to await before more is read,
or ``None``."""

_DONE: Final = b"[DONE]"
_BEFORE_A_BODY: Final = b" \t\r\n\xef\xbb\xbf"
_BODY_STARTS: Final = (b"{", b"[")
_EVENT_STARTS: Final = (b"data:", b"event:", b"id:", b"retry:", b":")
_UNANSWERED: Final = frozenset({502, 503})
"""Statuses of calls for which nothing was generated: the connection was refused, it was reset
before the first byte, or the engine itself is unavailable."""
_ANSWERED: Final = frozenset({400, 404, 413, 422, 429})
"""Statuses of a working engine that refuses this request."""
_PAUSES_S: Final = (0.05, 0.2, 0.8)
"""Seconds to wait before the same engine is asked again, by attempt."""
_NO_ROOM: Final = "max_tokens must be at least 1, got 0"
"""The refusal of vLLM for a prompt that fills the whole context, and for a client's own 0."""


class EngineStream:
    """The reply of one call: use :meth:`open`, :meth:`follow`, :meth:`close`, in this order."""

    def __init__(
        self,
        pool: EnginePool,
        request: EngineRequest,
        decoder: ReplyDecoder,
        *,
        call_id: str,
        session: Session,
        notes: list[Note],
        held: Held,
    ) -> None:
        """Create the stream.

        ``notes`` gets a note for each retry, and for the limit that ended the reply. ``held``
        counts the bytes of a whole reply.
        """
        self.engine: PooledEngine | None = None
        """The engine that was asked last."""
        self._pool = pool
        self._request = request
        self._decoder = decoder
        self._call_id = call_id
        self._session = session
        self._notes = notes
        self._limits = pool.limits
        self._held = held
        self._own_keys = pool.own_keys
        self._sink: Sink = _ignored
        self._sse: SseParser | None = None
        """The parser of a reply that comes as a stream."""
        # One buffer: pieces of many replies would leave holes in the heap.
        self._whole = None if request.stream else bytearray()
        """The bytes of a reply that comes whole."""
        self._received = self._counted = 0
        """Bytes of the reply so far, and the number of them that ``held`` has counted."""
        self._response: EngineResponse | None = None
        self._running_at: PooledEngine | None = None
        """The engine that counts this call as running."""
        self._asked_version = 0
        """The engine's version when it was asked. A whole reply is stamped with the version at its
        arrival, because only a stream shows which of its tokens are older."""
        self._failure: ApiError | None = None
        self._broke_off = False
        """Whether the reply ended before the engine had finished it."""
        self._over = False

    async def open(self) -> None:
        """Send the request and return when an engine has taken it. Raises :class:`ApiError`."""
        tried: list[PooledEngine] = []
        fields, may_learn = self._pool.upstream_fields, self._request.external
        while True:
            engine = self._pool.choose(self._session.id, self._session.homes, tried)
            if engine in tried:
                await asyncio.sleep(_PAUSES_S[min(len(tried), len(_PAUSES_S)) - 1])
            model = await self._pool.model_name(engine, self._request.model)
            body = self._request.body(model, fields)
            try:
                await self._ask(engine, body)
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

    async def follow(self, sink: Sink) -> None:
        """Pass the events of the reply to ``sink`` and return when the reply is whole.

        The reply may come whole or streamed, whatever was asked for.

        Raises :class:`ApiError`, after all events that came before the fault, and any exception
        that ``sink`` raises.
        """
        engine, response = self.engine, self._response
        assert engine is not None, "open() first"  # noqa: S101 - a programming error
        assert response is not None, "open() first"  # noqa: S101
        self._sink = sink
        try:
            await response.follow(self._arrived)
            # If no events come, an error can still have a status of its own.
            if not self._over and (events := self._rest()):
                sink(events)
        except EventTooLarge:
            raise self.ended_by("event_bytes", self._limits.event_bytes) from None
        except CONNECTION_ERRORS as error:
            self._failure = connection_error(error)
            self._broke_off = True
        if self._failure is not None:
            # What a reply says is no evidence against the engine: one agent's requests could
            # otherwise take it from all others.
            if self._broke_off and _is_failure(self._failure):
                engine.circuit.failed(session=self._session.id)
                engine.report(self._failure.message)
            raise self._failure
        if not engine.circuit.calm:
            engine.circuit.succeeded()
        if self._pool.external:
            self._pool.upstream_fields.sent(self._decoder.opaque_names)
        version = engine.serves.version
        if version != self._asked_version and not self._request.stream:
            self._notes.append(Note("version_changed_midway", f"{self._asked_version} {version}"))

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

    async def _ask(self, engine: PooledEngine, body: Sequence[bytes]) -> None:
        circuit, request = engine.circuit, self._request
        trial = not circuit.calm and circuit.begin()
        self.engine = self._running_at = engine
        self._asked_version = engine.serves.version
        engine.running += 1
        headers = f"x-request-id: {self._call_id}\r\n"
        try:
            transport, epoch = engine.transport, engine.serves.connection_epoch
            try:
                self._response = await transport.request(
                    "POST", request.path, *body, headers=headers, connection_epoch=epoch
                )
            except ConnectionEpochOver:
                await engine.serves.compare()
                if engine.serves.changed:
                    raise other_weights(engine.serves.version) from None
                self._response = await transport.request(
                    "POST", request.path, *body, headers=headers
                )
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

        An engine that sent a time to wait is not asked again, but another one may be.
        """
        if error.status not in _UNANSWERED or len(tried) > self._limits.retries:
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

    def _arrived(self, chunk: bytes) -> asyncio.Future[Any] | None:
        """Pass on the events of the bytes of one network read."""
        limits = self._limits
        self._received += len(chunk)
        if self._request.stream and self._received > limits.reply_bytes:
            raise self.ended_by("reply_bytes", limits.reply_bytes)
        if self._sse is None and self._whole is None and (start := chunk.lstrip(_BEFORE_A_BODY)):
            if start.startswith(_BODY_STARTS):
                self._notes.append(Note("whole_reply_to_stream"))
                self._whole = bytearray()
            else:
                self._sse = SseParser(limits.event_bytes)
        if self._sse is not None:
            if (arriving := self._decoder.arriving) is not None:
                chunk = arriving.feed(chunk)
            events = self._events(self._sse.feed(chunk))
            if self._over and self._response is not None:
                self._response.leave()
            return self._sink(events) if events else None
        if self._received > limits.event_bytes:
            raise EventTooLarge
        if self._whole is not None:
            self._whole.extend(chunk)
        if self._received - self._counted > STEP:
            self.hold(self._received - self._counted)
            self._counted = self._received
        return None

    def _rest(self) -> list[Event]:
        """Return the last events of a reply whose bytes have all come.

        The reply is a whole one, which is one JSON body or the events of a stream, or it is a
        stream without its end.
        """
        whole = self._whole
        if whole is None:
            payloads = [] if self._sse is None else self._last_payloads(self._sse)
        elif self._request.stream or not whole.lstrip().startswith(_EVENT_STARTS):
            self._over = True
            return self._events([bytes(whole)])
        else:
            self._notes.append(Note("streamed_reply_to_whole"))
            sse = SseParser()
            payloads = [*sse.feed(bytes(whole)), *sse.finish()]
        events = self._events(payloads)
        if not self._over:
            self._over = self._broke_off = True
            events += self._events([])
        return events

    def _last_payloads(self, sse: SseParser) -> list[bytes]:
        """Return the payloads that are left when a stream ends without its end."""
        arriving = self._decoder.arriving
        held = b"" if arriving is None else arriving.end()
        return [*sse.feed(held), *sse.finish()]

    def _events(self, payloads: list[bytes]) -> list[Event]:
        """Return the events of ``payloads``, and the last events if they end the reply."""
        events: list[Event] = []
        cleaned = self._cleaned if self._own_keys else None
        try:
            for payload in payloads:
                if payload == _DONE:
                    self._over = True
                    break
                events += self._decoder.events(payload, cleaned)
            if self._over:
                events += self._decoder.last_events()
        except ApiError as failure:
            self._over = True
            self._failure = failure
        return events


def _is_failure(error: ApiError) -> bool:
    """Return True if ``error`` is evidence against the engine and not against the request."""
    return error.status in _UNANSWERED or error.kind == "upstream_timeout"


def _ignored(_: list[Event]) -> None:
    """Ignore the events of a reply that nobody follows."""
