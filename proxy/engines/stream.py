"""A call's reply from a pool of engines, as batches of canonical events.

Whole replies and streams take the same path: a whole reply is one batch.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from bridle.proxy.engines.asking import UpstreamCall
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.engines.reply import ReplyDecoder
from bridle.proxy.engines.request import EngineRequest
from bridle.proxy.session.session import Session
from bridle.proxy.wire.canonical import ApiError, Event
from bridle.proxy.wire.in_flight import STEP, Held
from bridle.proxy.wire.sse import EventTooLarge, SseParser
from bridle.store.records import Note

_DONE: Final = b"[DONE]"
_BEFORE_A_BODY: Final = b" \t\r\n\xef\xbb\xbf"
_BODY_STARTS: Final = (b"{", b"[")
_EVENT_STARTS: Final = (b"data:", b"event:", b"id:", b"retry:", b":")


class EngineStream(UpstreamCall[Event]):
    """The reply of one call as canonical events."""

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
        """See :class:`~bridle.proxy.engines.asking.UpstreamCall`."""
        super().__init__(pool, request, call_id=call_id, session=session, notes=notes, held=held)
        self._decoder = decoder
        self._sse: SseParser | None = None
        """The parser of a reply that comes as a stream."""
        # One buffer: pieces of many replies would leave holes in the heap.
        self._whole = None if request.stream else bytearray()
        """The bytes of a reply that comes whole."""

    def _came(self) -> None:
        if self._pool.external:
            self._pool.upstream_fields.sent(self._decoder.opaque_names)

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
