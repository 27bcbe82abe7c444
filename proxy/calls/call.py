"""One call, from its admission to the commit of its record.

Streaming or not, the events take the same path: the recording takes them, the emitter turns them
into client bytes (or nothing, if the client wants the reply whole), the record is committed, and
only then the client gets the terminal event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from msgspec import structs

from bridle.proxy.continuation.roles import refusal_hint
from bridle.proxy.dialects.dialect import Dialect
from bridle.proxy.dialects.errors import midway
from bridle.proxy.engines.asking import UpstreamCall
from bridle.proxy.engines.rendering import EngineForm
from bridle.proxy.engines.reply import ReplyDecoder
from bridle.proxy.engines.request import EngineRequest
from bridle.proxy.engines.stream import EngineStream
from bridle.proxy.engines.weights import EngineSampling
from bridle.proxy.http.client import Client, Headers
from bridle.proxy.recording.recorder import Recording, error_fields
from bridle.proxy.services import Services
from bridle.proxy.session.registry import store_unavailable
from bridle.proxy.wire.canonical import (
    ApiError,
    Emitter,
    Event,
    HttpError,
)
from bridle.proxy.wire.in_flight import STEP, Held
from bridle.store.call import CallEnded, EndedFacts
from bridle.store.errors import RecordRejected, StoreUnavailable
from bridle.store.records import CLIENT_DISCONNECTED, CONSTRAINED, CallStatus, Note, Sampler

log = logging.getLogger("bridle.proxy")


@dataclass(frozen=True, slots=True)
class CallFailure:
    """The failure of a call that did not complete."""

    reason: str
    error: ApiError | None
    """The error that the client gets; ``None`` if there is no client any more."""


_TOKEN_BYTES: Final = 160
"""Bytes of a sampled token in memory: its id, its logprob and its text."""

CLIENT_GONE: Final = CallFailure(CLIENT_DISCONNECTED, None)
PROXY_STOPPED: Final = CallFailure("proxy_stopped", None)


class ReplyFacts(Protocol):
    """The facts about a reply that its reader knows when it is over."""

    notes: dict[Note, None]
    model: str | None
    contradiction: str | None


class Call:
    """A call whose record has begun: it owns the notes, the engine's stream and the client's.

    Exactly one of :meth:`serve` and :meth:`refuse` is awaited.
    """

    def __init__(
        self,
        services: Services,
        client: Client,
        dialect: Dialect,
        recording: Recording,
        ask: EngineRequest,
        form: EngineForm,
        notes: list[Note],
        held: Held,
    ) -> None:
        begun, request, pool = recording.begun, recording.request, form.pool
        minted = dialect.mint(begun.id, int(begun.started_at), request.model)
        self.notes = notes
        self._services = services
        self._client = client
        self._dialect = dialect
        self._request = request
        self._recording = recording
        self._ask = ask
        self._pool = pool
        self._rules = form.rules
        self._minted = minted
        self._emitter: Emitter | None = dialect.emitter(request, minted) if request.stream else None
        self._begun = False
        self._content_type = "" if self._emitter is None else self._emitter.content_type
        self._headers: Headers = (
            (b"x-request-id", begun.id.encode()),
            (b"x-bridle-session", begun.session_id.encode()),
        )
        self._follow_engine(held)
        self._most_characters = services.settings.limits.reply_characters
        self._unpacked = self._sent = self._sampled = 0
        """Number of bytes that were sent since they were last packed, of bytes that were sent until
        then, and of tokens that were sampled until then."""

    def _follow_engine(self, held: Held) -> None:
        """Create the reader of the reply and the stream that it reads."""
        recording, ask = self._recording, self._ask
        decoder = ReplyDecoder(
            self._minted,
            choices=ask.choices,
            detail=ask.detail,
            tool_call_prefix=self._dialect.tool_call_prefix,
            known_prompt=recording.session.prompt,
            tools=recording.request.tools,
        )
        stream = EngineStream(
            self._pool,
            ask,
            decoder,
            call_id=recording.begun.id,
            session=recording.session,
            notes=self.notes,
            held=held,
        )
        self._reader: ReplyFacts = decoder
        self._stream: UpstreamCall[Any] = stream

    def _follow(self) -> Awaitable[None]:
        """Pass what the engine sends on until the reply is over."""
        return self._stream.follow(self._take)

    async def serve(self) -> None:
        """Serve the client and keep the record, whatever happens on either side."""
        try:
            ending = await self._converse()
            if isinstance(ending, CallFailure):
                self._stream.close()
                await self._fail(ending)
            else:
                await self._complete(ending)
        finally:
            self._stream.close()

    async def refuse(self, error: ApiError) -> None:
        """Send and record ``error`` without asking an engine."""
        await self._fail(CallFailure(error.kind, error))

    async def _converse(self) -> CallFailure | bytes:
        """Pass the engine's events to the record and to the client.

        Return the client's last bytes, not yet sent, if the reply is whole, else the failure.
        """
        watch, client, gate = self._services.watch, self._client, self._pool.gate
        client_left = False
        try:
            watch.enter(client, None if self._emitter is None else self._keep_alive)
            try:
                if gate.paused or time.monotonic() > gate.fresh_until:
                    await gate.passed()
                gate.running += 1
                try:
                    await self._stream.open()
                    await self._follow()
                finally:
                    gate.running -= 1
            finally:
                client_left = watch.leave(client)
            return self._last_bytes()
        except ApiError as error:
            return CallFailure(error.kind, self._worded(error))
        except asyncio.CancelledError:
            if client_left:
                return CLIENT_GONE
            self._stream.close()
            await asyncio.shield(self._fail(PROXY_STOPPED))
            raise
        except Exception as error:
            log.exception("internal_error", extra=self._ids())
            self.notes.append(Note("internal_error", type(error).__name__))
            return CallFailure("internal", ApiError("internal", "the proxy failed", status=500))

    def _worded(self, error: ApiError) -> ApiError:
        """Return ``error`` with the client's names of parameters, and with what helps."""
        hint = refusal_hint(self._rules, self._request.messages)
        return error.hinted(hint).renamed(self._request.names)

    def _take(self, events: list[Event]) -> asyncio.Future[None] | None:
        """Pass ``events`` to the record, and to the client of a stream.

        Return a future to await if the client reads slowly, else ``None``.
        """
        fold = self._recording.fold
        fold.take(events, self._stream.version)
        if fold.characters > self._most_characters:
            raise self._stream.ended_by("reply_characters", self._most_characters)
        emitter = self._emitter
        if emitter is None:
            return None
        pieces = [] if self._begun else self._opening()
        for event in events:
            pieces.append(emitter.event(event))
        body = b"".join(pieces)
        waiting = self._write(body)
        self._unpacked += len(body)
        self._pack_if_long()
        return waiting

    def _keep_alive(self) -> None:
        """Send a sign of life to a streaming client that has received nothing for long."""
        if self._emitter is not None and not self._client.closed:
            self._write(b"".join((*self._opening(), self._emitter.keep_alive())))

    def _opening(self) -> list[bytes]:
        """Return the stream's first bytes, once; an emitter begins before it gets any event."""
        if self._begun or self._emitter is None:
            return []
        self._begun = True
        return [self._emitter.begin()]

    def _write(self, body: bytes) -> asyncio.Future[None] | None:
        """Send ``body`` to the client of a stream.

        The status line is sent first if that has not been done yet.
        """
        if not self._client.started:
            self._client.start_stream(self._content_type, self._headers)
        if not body:
            return None
        self._recording.sent(body)
        return self._client.write(body)

    def _pack_if_long(self) -> None:
        """Compress the recorded bytes of the stream when many have come.

        Raises :class:`ApiError` if they, or all bytes that the running calls hold, are too many.
        """
        if self._unpacked <= STEP:
            return
        self._sent += self._unpacked
        self._unpacked = 0
        limit = self._services.settings.limits.reply_bytes
        if self._sent > limit:
            raise self._stream.ended_by("reply_bytes", limit)
        sampled = self._recording.fold.sampled
        tokens, self._sampled = sampled - self._sampled, sampled
        self._stream.hold(self._recording.pack() + _TOKEN_BYTES * tokens)

    def _last_bytes(self) -> bytes:
        """Return the terminal bytes: the whole reply, or the end of the stream."""
        if self._emitter is None:
            return self._dialect.reply(self._request, self._minted, self._recording.fold.reply())
        return b"".join((*self._opening(), self._emitter.end()))

    async def _complete(self, last: bytes) -> None:
        recording, client = self._recording, self._client
        recording.sent(last)
        try:
            if recording.link.parent is None:
                await self._compare_rendering()
            await self._commit(CallStatus.COMPLETE)
        except StoreUnavailable as error:
            self._unrecorded(error)
            await self._send_error(self._error_bytes(store_unavailable()))
            return
        if self._emitter is None:
            await client.respond(200, last, headers=self._headers)
            return
        if not client.started:
            client.start_stream(self._content_type, self._headers)
        await client.finish(last)

    async def _compare_rendering(self) -> None:
        """Compare the prompt of a call that continues no other with the local rendering.

        Engines of other models have another template and are not compared.
        """
        check, engine = self._services.templates[self._pool].check, self._stream.engine
        if check is None or engine is None:
            return
        begun, prompt = self._recording.begun, self._recording.fold.prompt_token_ids
        note = await check.compare(engine, self._ask, prompt, begun.id, begun.started_at)
        if note is not None:
            self.notes.append(note)

    async def _fail(self, failure: CallFailure) -> None:
        reply = None if failure.error is None else self._error_bytes(failure.error)
        if reply is not None:
            self._recording.sent(reply.body)
        try:
            await self._commit(self._cut_status(), failure)
        except StoreUnavailable as lost:
            self._unrecorded(lost)
        if reply is not None:
            await self._send_error(reply)

    def _cut_status(self) -> CallStatus:
        """Return the status of a call whose reply did not come to its end."""
        return CallStatus.PARTIAL if self._recording.fold.sampled else CallStatus.FAILED

    async def _commit(self, status: CallStatus, failure: CallFailure | None = None) -> CallEnded:
        engine = self._stream.engine
        sampler = None if engine is None else self._sampler(engine.sampling)
        notes = (*self.notes, *self._reader.notes)
        if sampler is not None and sampler.grammar:
            notes += (Note(CONSTRAINED, sampler.grammar),)
        outcome = EndedFacts(
            status=status,
            notes=notes,
            sampling=self._ask.sampling,
            sampler=sampler,
            model_served=self._reader.model,
            policy=self._pool.policy,
            reason=None if failure is None else failure.reason,
            error={} if failure is None or failure.error is None else error_fields(failure.error),
        )
        name = None if engine is None else engine.name
        return await self._services.recorder.commit(
            self._recording, outcome, name, self._reader.contradiction
        )

    def _sampler(self, engine: EngineSampling) -> Sampler:
        sampler = self._ask.sampler(engine)
        if not sampler.grammar or engine.grammars != "answer":
            return sampler
        template, reply = self._services.templates[self._pool], self._recording.fold.reply()
        return structs.replace(sampler, unconstrained=template.reasoning_length(reply))

    def _unrecorded(self, error: StoreUnavailable) -> None:
        self._services.metrics.unrecorded.inc()
        log.error("call_not_recorded", extra={**self._ids(), "error": str(error)})
        if isinstance(error, RecordRejected):
            # Its session may have been deleted: the next call asks the store.
            self._services.sessions.forget(self._recording.begun.session_id)

    def _ids(self) -> dict[str, str]:
        begun = self._recording.begun
        return {"session": begun.session_id, "call": begun.id}

    def _error_bytes(self, error: ApiError) -> HttpError:
        """Return ``error`` inside the stream if it has begun, else as a response of its own."""
        if self._emitter is not None and self._client.started:
            return HttpError(200, self._emitter.fail(midway(error)))
        return self._dialect.error(error)

    async def _send_error(self, reply: HttpError) -> None:
        if self._client.started:
            await self._client.finish(reply.body)
        else:
            await self._client.refuse(reply, self._headers)
