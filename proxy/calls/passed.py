"""A call to an upstream that speaks the client's dialect: bytes through, and recorded.

The upstream gets the client's body and the headers of its API, with the proxy's own key and its own
name of the model. The client gets the upstream's status, headers and bytes. The record has both,
and the conversation as the dialect reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final

import msgspec

from bridle.proxy.calls.call import Call, CallFailure
from bridle.proxy.continuation.prompt import NO_PROMPT
from bridle.proxy.dialects.body import model_of
from bridle.proxy.dialects.dialect import Dialect
from bridle.proxy.dialects.errors import midway
from bridle.proxy.dialects.routes import Route
from bridle.proxy.dialects.wording import ReplyWords
from bridle.proxy.engines.passed import PassedStream
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.engines.rendering import EngineForm
from bridle.proxy.engines.request import EngineRequest, PassedRequest
from bridle.proxy.http.client import Client, encoded
from bridle.proxy.wire.canonical import ApiError, HttpError, Request
from bridle.proxy.wire.in_flight import Held
from bridle.store.call import CallEnded
from bridle.store.records import CallStatus

_HEADERS: Final = ("accept", "user-agent", "x-stainless-")
"""The beginnings of the names of headers that every upstream gets."""


def passed_request(
    dialect: Dialect, route: Route, client: Client, request: Request, body: bytes
) -> EngineRequest:
    """Return the request for an upstream that speaks ``dialect``: the client's own."""
    native = dialect.native
    assert native is not None, "the upstream speaks it"  # noqa: S101 - a programming error
    allowed = (*_HEADERS, *native.headers)
    headers = [
        f"{name}: {value}\r\n"
        for name, value in client.headers.items()
        if name.startswith(allowed) and name != "accept-encoding"
    ]
    return EngineRequest(
        path="",
        model=request.model,
        fields={},
        stream=request.stream,
        choices=request.sampling.n or 1,
        detail=False,
        sampling=msgspec.to_builtins(request.sampling),
        external=True,
        passed=PassedRequest(
            target=_target(route, client),
            content=body,
            model=dict(route.parameters).get("model") or model_of(body) or request.model,
            headers="".join(headers),
            credentials=dialect.provider.key_header,
        ),
    )


def passed_form(pool: EnginePool, request: Request) -> EngineForm:
    """Return the form of a request that its upstream gets as it is."""
    return EngineForm(request, NO_PROMPT, (), None, pool)


def _target(route: Route, client: Client) -> str:
    """Return the path without the session, and the query without a key."""
    path: bytes = client.scope.get("raw_path") or client.scope["path"].encode()
    if route.session is not None:
        path = b"/" + path.removeprefix(b"/s/").partition(b"/")[2]
    pieces = client.scope["query_string"].decode("latin-1").split("&")
    query = "&".join(one for one in pieces if one and one.partition("=")[0] != "key")
    return path.partition(b"?")[0].decode("latin-1") + (f"?{query}" if query else "")


class PassedCall(Call):
    """See :class:`bridle.proxy.calls.call.Call`."""

    def _follow_engine(self, held: Held) -> None:
        recording, native = self._recording, self._dialect.native
        assert native is not None, "the upstream speaks it"  # noqa: S101 - a programming error
        self._received = native.reader(recording.request)
        self._passed = PassedStream(
            self._pool,
            self._ask,
            self._received,
            call_id=recording.begun.id,
            session=recording.session,
            notes=self.notes,
            held=held,
        )
        self._reader, self._stream = self._received, self._passed
        change = native.change
        self._words = None if change is None else ReplyWords(native.wording, change)
        # The upstream's bytes begin the stream.
        self._begun = True

    def _follow(self) -> Awaitable[None]:
        return self._passed.follow(self._pass)

    def _worded(self, error: ApiError) -> ApiError:
        return error

    def _pass(self, pieces: list[bytes]) -> asyncio.Future[None] | None:
        """Record the bytes of whole events and send them to the client."""
        fold, body = self._recording.fold, b"".join(pieces)
        if self._words is not None:
            body = self._words.events(body)
        fold.first_token_at = fold.first_token_at or self._recording.now()
        self._take_headers()
        waiting = self._write(body)
        self._unpacked += len(body)
        self._pack_if_long()
        return waiting

    def _take_headers(self) -> None:
        """Take the upstream's headers for the client. Its own id of the request stays."""
        headers = self._passed.headers
        if not headers:
            return
        self._content_type = headers.pop("content-type", self._content_type)
        ours = dict(self._headers)
        if "x-request-id" in headers:
            ours.pop(b"x-request-id", None)
        self._headers = (*ours.items(), *encoded(headers.items()))

    def _keep_alive(self) -> None:
        """Send nothing: the upstream has signs of life of its own."""

    def _last_bytes(self) -> bytes:
        self._take_headers()
        last = bytes(self._passed.last)
        if self._words is None:
            return last
        if not self._passed.streams:
            return self._words.whole(last)
        return self._words.events(last) + self._words.end()

    async def _commit(self, status: CallStatus, failure: CallFailure | None = None) -> CallEnded:
        received = self._received
        self._recording.fold.take(received.events())
        if status is not CallStatus.COMPLETE:
            said = self._recording.fold.characters
            status = CallStatus.PARTIAL if said else CallStatus.FAILED
        ended = await super()._commit(status, failure)
        stored = self._services.stored.get(self._dialect.name)
        if stored is not None and received.identifier is not None:
            stored.keep(received.identifier, ended.id)
        return ended

    def _error_bytes(self, error: ApiError) -> HttpError:
        if error.passed is not None:
            return error.passed
        if self._emitter is not None and self._client.started:
            return HttpError(200, self._emitter.fail(midway(error)))
        return self._dialect.error(error)

    async def _send_error(self, reply: HttpError) -> None:
        if not self._client.started and reply.status == 200:
            self._take_headers()
            if self._passed.streams:
                self._client.start_stream(self._content_type, self._headers)
            else:
                await self._client.respond(200, reply.body, headers=self._headers)
                return
        await super()._send_error(reply)
