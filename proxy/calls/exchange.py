"""One call, from its admission to its last byte: the request's way with no turning back.

Streaming or not, the events go the same way: the recording takes them, the emitter turns them into
client bytes (or nothing, when the client wants the reply whole), the record is committed, and only
then the client is told that the reply is complete.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Final

from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.engines.pooled_reply import PooledReply
from bridle.proxy.engines.reply import EngineReply
from bridle.proxy.engines.request import EngineRequest
from bridle.proxy.http.client import Client, Headers
from bridle.proxy.http.presence import ClientGone
from bridle.proxy.recording.recorder import Recording
from bridle.proxy.services import Services
from bridle.proxy.sessions.registry import store_unavailable
from bridle.proxy.wire.canonical import (
    ApiError,
    Dialect,
    Emitter,
    Event,
    HttpError,
    Minted,
    Request,
)
from bridle.store.errors import RecordRejected, StoreUnavailable
from bridle.store.records import CallStatus, Note

log = logging.getLogger("bridle.proxy")


@dataclass(frozen=True, slots=True)
class Failure:
    """How a call ended that did not complete."""

    reason: str
    error: ApiError | None
    """What the client is told; ``None`` when there is no client any more."""


CLIENT_GONE: Final = Failure("client_disconnected", None)
PROXY_STOPPED: Final = Failure("proxy_stopped", None)


class Exchange:
    """A call that has been admitted and begun."""

    def __init__(
        self,
        services: Services,
        client: Client,
        dialect: Dialect,
        request: Request,
        minted: Minted,
        recording: Recording,
        ask: EngineRequest,
        engines: EnginePool,
    ) -> None:
        self._services = services
        self._client = client
        self._dialect = dialect
        self._request = request
        self._minted = minted
        self._recording = recording
        self._ask = ask
        self._engines = engines
        self._emitter: Emitter | None = dialect.emitter(request, minted) if request.stream else None
        self._begun = False
        self._content_type = "" if self._emitter is None else self._emitter.content_type
        self._headers: Headers = (
            ("x-request-id", minted.call_id),
            ("x-bridle-session", recording.begun.session_id),
        )

    async def run(self) -> None:
        """Serves the client and keeps the record, whatever happens on either side."""
        reply = EngineReply(
            self._minted,
            choices=self._ask.choices,
            detail=self._ask.detail,
            tool_call_prefix=self._dialect.tool_call_prefix,
            read_prompt=partial(self._services.prompt_ids.read, self._recording.begun.session_id),
        )
        async with PooledReply(
            self._engines,
            self._ask,
            reply,
            self._minted.call_id,
            self._recording.begun.session_id,
            self._recording.notes,
            retries=self._services.settings.limits.retries,
        ) as stream:
            ending = await self._converse(stream)
            self._recording.model_served = reply.model
            if isinstance(ending, Failure):
                stream.close()
                await self._fail(ending)
            else:
                await self._complete(ending)

    async def refuse(self, error: ApiError) -> None:
        """Tells the client, and keeps that in the record, without asking an engine."""
        await self._fail(Failure(error.kind, error))

    def keep_alive(self) -> None:
        """Tells a streaming client that has heard nothing for long that its reply is coming."""
        if self._emitter is not None and not self._client.closed:
            self._write(b"".join((*self._opening(), self._emitter.keep_alive())))

    @property
    def silent_since(self) -> float:
        return self._client.last_write

    async def _converse(self, stream: PooledReply) -> Failure | bytes:
        """The engine's events to record and client; the client's last bytes, not yet sent, when
        the reply is whole, else how it failed."""
        keep_alives = self._services.keep_alives
        try:
            async with self._client.present(self._services.watch):
                if self._emitter is not None:
                    self._client.touch()
                    keep_alives.add(self)
                await self._engines.gate.enter()
                try:
                    self._recording.policy = await stream.open()
                    await stream.follow(self._take)
                finally:
                    self._engines.gate.leave()
            return self._last_bytes()
        except ClientGone:
            return CLIENT_GONE
        except ApiError as error:
            return Failure(error.kind, error.renamed(self._request.names))
        except asyncio.CancelledError:
            stream.close()
            await asyncio.shield(self._fail(PROXY_STOPPED))
            raise
        except Exception as error:
            log.exception("internal_error", extra=self._ids())
            self._recording.notes.append(Note("internal_error", type(error).__name__))
            return Failure("internal", ApiError("internal", "the proxy failed", status=500))
        finally:
            keep_alives.discard(self)

    def _take(self, events: list[Event]) -> asyncio.Future[None] | None:
        """To the record, and to the client of a stream; what to wait for when it reads slowly."""
        self._recording.take(events)
        emitter = self._emitter
        if emitter is None:
            return None
        pieces = [] if self._begun else self._opening()
        for event in events:
            pieces.append(emitter.event(event))
        return self._write(b"".join(pieces))

    def _opening(self) -> list[bytes]:
        """The stream's first bytes, once; an emitter begins before it is told anything."""
        if self._begun or self._emitter is None:
            return []
        self._begun = True
        return [self._emitter.begin()]

    def _write(self, body: bytes) -> asyncio.Future[None] | None:
        """``body`` to the client of a stream, after the status line if that has not left yet."""
        if not self._client.started:
            self._client.start_stream(self._content_type, self._headers)
        if not body:
            return None
        self._recording.sent(body)
        return self._client.write(body)

    def _last_bytes(self) -> bytes:
        """What tells the client that its reply is whole: all of it, or the end of the stream."""
        if self._emitter is None:
            return self._dialect.reply(self._request, self._minted, self._recording.fold.reply())
        return b"".join((*self._opening(), self._emitter.end()))

    async def _complete(self, last: bytes) -> None:
        self._recording.sent(last)
        try:
            await self._commit(CallStatus.COMPLETE)
        except StoreUnavailable as error:
            self._unrecorded(error)
            if self._services.settings.when_store_is_down == "fail":
                await self._tell(self._error_bytes(store_unavailable()))
                return
        client = self._client
        if self._emitter is None:
            await client.respond(200, last, headers=self._headers)
            return
        if not client.started:
            client.start_stream(self._content_type, self._headers)
        await client.finish(last)

    async def _fail(self, failure: Failure) -> None:
        told = None if failure.error is None else self._error_bytes(failure.error)
        if told is not None:
            self._recording.sent(told.body)
        try:
            sampled = self._recording.fold.sampled
            await self._commit(CallStatus.PARTIAL if sampled else CallStatus.FAILED, failure)
        except StoreUnavailable as lost:
            self._unrecorded(lost)
        if told is not None:
            await self._tell(told)

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
        """``error`` inside the stream when it has begun, else as a response of its own."""
        if self._emitter is not None and self._client.started:
            return HttpError(200, self._emitter.fail(error))
        return self._dialect.error(error)

    async def _tell(self, told: HttpError) -> None:
        if self._emitter is not None and told.status == 200:
            if not self._client.started:
                self._client.start_stream(self._content_type, self._headers)
            await self._client.finish(told.body)
        else:
            await self._client.refuse(told, self._headers)

    async def _commit(self, status: CallStatus, failure: Failure | None = None) -> None:
        await self._services.recorder.commit(
            self._recording,
            status,
            reason=failure.reason if failure else None,
            error=failure.error if failure else None,
        )
