"""The reply of an upstream that speaks the client's dialect, as bytes for the client.

The bytes go to the client as they are. A reader takes the same events for the record. The event
that ends the reply, and what comes after it, is held until the record is committed.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from bridle.proxy.dialects.received import ReceivedReply
from bridle.proxy.engines.asking import UpstreamCall
from bridle.proxy.engines.errors import (
    CONNECTION_ERRORS,
    connection_error,
    refused,
    seconds,
    without_keys,
)
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.engines.request import EngineRequest
from bridle.proxy.engines.transport import EngineResponse
from bridle.proxy.session.session import Session
from bridle.proxy.wire.canonical import ApiError, HttpError
from bridle.proxy.wire.in_flight import STEP, Held
from bridle.proxy.wire.sse import END_OF_EVENT, EventTooLarge, SseParser
from bridle.store.records import Note

_OF_THE_CONNECTION: Final = frozenset(
    {
        *("cache-control", "connection", "content-encoding", "content-length", "date"),
        *("keep-alive", "proxy-authenticate", "server", "set-cookie", "trailer"),
        *("transfer-encoding", "upgrade", "x-accel-buffering"),
    }
)
"""Headers of a response that belong to the connection with the upstream, or are set anew."""


class PassedStream(UpstreamCall[bytes]):
    """The reply of one call as the upstream's own bytes."""

    def __init__(
        self,
        pool: EnginePool,
        request: EngineRequest,
        reader: ReceivedReply,
        *,
        call_id: str,
        session: Session,
        notes: list[Note],
        held: Held,
    ) -> None:
        """See :class:`~bridle.proxy.engines.asking.UpstreamCall`.

        ``reader`` reads the reply for the record.
        """
        super().__init__(pool, request, call_id=call_id, session=session, notes=notes, held=held)
        self.last = bytearray()
        """The held bytes: a whole reply, or the event that ends a stream and what follows it."""
        self._reader = reader
        self._sse = SseParser()
        self._event = bytearray()
        """The bytes of an event that has not ended."""
        self._streams: bool | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response that the client gets, with lower-case names."""
        response = self._response
        return {} if response is None else _passed_on(response.headers)

    @property
    def streams(self) -> bool:
        if self._streams is None:
            self._streams = self.headers.get("content-type", "").startswith("text/event-stream")
        return self._streams

    async def _refused(self, response: EngineResponse) -> ApiError:
        """Return the refusal, which the client gets in the upstream's own words."""
        try:
            body = self._cleaned(await response.read())
        except CONNECTION_ERRORS as broken:
            return connection_error(broken)
        status, headers = response.status, _passed_on(response.headers)
        error = refused(body, status, seconds(headers.get("retry-after")))
        error.passed = HttpError(status, body, tuple(headers.items()))
        error.status = status
        return error

    def _arrived(self, chunk: bytes) -> asyncio.Future[Any] | None:
        self._received += len(chunk)
        if self._received > self._limits.reply_bytes:
            raise self.ended_by("reply_bytes", self._limits.reply_bytes)
        if not self.streams:
            if self._received > self._limits.event_bytes:
                raise EventTooLarge
            self.last.extend(chunk)
            if self._received - self._counted > STEP:
                self.hold(self._received - self._counted)
                self._counted = self._received
            return None
        pieces = self._events(chunk)
        return self._sink(pieces) if pieces else None

    def _events(self, chunk: bytes) -> list[bytes]:
        """Return the bytes of the events that ``chunk`` completes and that need not be held."""
        start = max(0, len(self._event) - 3)
        self._event.extend(chunk)
        pieces: list[bytes] = []
        begin = 0
        for end in END_OF_EVENT.finditer(self._event, start):
            pieces += self._read(bytes(self._event[begin : end.end()]))
            begin = end.end()
        del self._event[:begin]
        if len(self._event) > self._limits.event_bytes:
            raise EventTooLarge
        return pieces

    def _read(self, event: bytes, *, last: bool = False) -> list[bytes]:
        """Read one event for the record. Return its bytes unless they are held.

        The ``last`` one may lack its blank line.
        """
        event = self._cleaned(event)
        for payload in (*self._sse.feed(event), *(self._sse.finish() if last else ())):
            self._reader.take(payload)
        if not self._reader.over:
            return [event]
        self.last.extend(event)
        return []

    def _broke(self, error: Exception) -> None:
        # A connection may break after the event that ends the reply.
        if self._reader.over:
            self._rest()
        else:
            super()._broke(error)

    def _rest(self) -> list[bytes]:
        self._over = True
        reader = self._reader
        pieces: list[bytes] = []
        if not self.streams:
            self.last = bytearray(self._cleaned(bytes(self.last)))
            reader.whole(bytes(self.last))
        elif self._event:
            pieces = self._read(bytes(self._event), last=True)
            self._event.clear()
        if reader.failure is None and not reader.over:
            message = "the upstream's reply ended before it was finished"
            reader.failure = ApiError("upstream_error", message, status=502)
        if reader.failure is not None:
            # The upstream has ended the reply itself: nothing is added to its words.
            reader.failure.passed = HttpError(200, bytes(self.last))
            self._failure = reader.failure
        return pieces

    def _came(self) -> None:
        """Learn nothing: the upstream gets what the client sends."""


async def pass_once(pool: EnginePool, request: EngineRequest) -> HttpError:
    """Pass a request on that makes no call, and return the upstream's response, good or bad.

    Raises :class:`ApiError` if the upstream cannot be reached.
    """
    passed = request.passed
    assert passed is not None, "the upstream speaks it"  # noqa: S101 - a programming error
    engine = pool.choose("", {})
    model = await pool.model_name(engine, request.model)
    try:
        response = await engine.transport.request(
            "POST",
            passed.path(model),
            passed.body(model),
            headers=passed.headers,
            key_header=passed.credentials,
        )
        body = without_keys(await response.read(), pool.own_keys)
    except CONNECTION_ERRORS as error:
        raise connection_error(error) from error
    return HttpError(response.status, body, tuple(_passed_on(response.headers).items()))


def _passed_on(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in _OF_THE_CONNECTION}
