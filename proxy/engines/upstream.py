"""The engine's side of a call: requests to one engine, replies as batches of canonical events."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import orjson

from bridle.engine.contract.contract import HEALTH, MODELS, TOKENIZE, VERSION, WEIGHT_INFO
from bridle.proxy.engines.connections import (
    ConnectionBroke,
    ConnectionFailed,
    EngineConnections,
    EngineReplied,
)
from bridle.proxy.engines.reply import EngineReply
from bridle.proxy.engines.request import EngineRequest
from bridle.proxy.settings import ProxySettings
from bridle.proxy.wire.canonical import ApiError, Event, Request
from bridle.proxy.wire.sse import SseParser

Sink = Callable[[list[Event]], "asyncio.Future[Any] | None"]
"""Takes the events of one network read, at once; returns what to wait for before more is read."""

_DONE: Final = b"[DONE]"
_MODELS_FRESH_S: Final = 30.0
_HEALTH_TIMEOUT_S: Final = 15.0
"""Long: an engine that is busy loading weights or compiling is not an engine that is gone."""
_FINGERPRINTS: Final = ((VERSION, "weights_fingerprint"), (WEIGHT_INFO, "weight_version"))
"""Where engines tell what weights they serve: our own, and vLLM."""
_NO_ROUTE: Final = frozenset({404, 405, 501})
_OVERFLOW = re.compile(r"maximum (context|model) length|context (length|window)", re.IGNORECASE)
_NO_ROOM = "max_tokens must be at least 1, got 0"
"""What vLLM says of a prompt that takes up the whole context, as of a client's own 0."""
_CONNECTION_ERRORS: Final = (ConnectionFailed, ConnectionBroke, TimeoutError, OSError)


class Upstream:
    """Connections to one engine. Start it inside the event loop that uses it."""

    def __init__(self, settings: ProxySettings, base: str, api_key: str | None = None) -> None:
        """``base`` is the engine's URL without ``/v1``."""
        self.base = base
        self._settings = settings
        self._api_key = api_key
        self._http: EngineConnections | None = None
        self._models: tuple[dict[str, Any], ...] = ()
        self._models_at = float("-inf")
        self._models_epoch = 0

    async def start(self) -> None:
        limits = self._settings.limits
        self._http = EngineConnections(
            self.base,
            api_key=self._api_key,
            limit=limits.max_connections,
            connect_timeout_s=limits.connect_timeout_s,
            stall_timeout_s=limits.stall_timeout_s,
        )

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    def reply(self, request: EngineRequest, reply: EngineReply, call_id: str) -> EngineStream:
        """The engine's reply to ``request``, to be opened, followed and closed."""
        return EngineStream(self, request, reply, call_id)

    async def post(
        self, path: str, body: bytes, call_id: str, connection_epoch: int | None = None
    ) -> EngineReplied:
        """The reply, its headers read. Raises :class:`ApiError`, and
        :class:`bridle.proxy.engines.connections.ConnectionEpochOver` outside of
        ``connection_epoch``."""
        try:
            return await self._connections.request(
                "POST",
                path,
                body,
                headers=f"x-request-id: {call_id}\r\n",
                connection_epoch=connection_epoch,
            )
        except _CONNECTION_ERRORS as error:
            raise connection_error(error) from error

    async def models(self) -> tuple[dict[str, Any], ...]:
        """The engine's model cards, as new as half a minute while it answers, else the last known.

        Raises :class:`ApiError` when it has never told any.
        """
        if not self.fresh_models:
            try:
                self._models = await self._read_models()
                self._models_at = time.monotonic()
                self._models_epoch = self.connection_epoch
            except ApiError:
                if not self._models:
                    raise
        return self._models

    @property
    def fresh_models(self) -> tuple[dict[str, Any], ...]:
        """The model cards if they are new enough to be gone by, and the engine has not been started
        anew since; else none."""
        if time.monotonic() - self._models_at > _MODELS_FRESH_S:
            return ()
        connections = self._connections
        same = connections.any_open and connections.connection_epoch == self._models_epoch
        return self._models if same else ()

    async def _read_models(self) -> tuple[dict[str, Any], ...]:
        with _told("the engine's model list"):
            response = await self._connections.request("GET", MODELS)
            cards = orjson.loads(await response.read())["data"]
            return tuple(card for card in cards if "id" in card)

    async def count_tokens(self, request: Request, model: str) -> int:
        """How many prompt tokens the engine's own template makes of ``request``."""
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
        response = await self.post(TOKENIZE, orjson.dumps(body), "count")
        if response.status != 200:
            raise await refusal(response)
        with _told("the engine's token count"):
            return int(orjson.loads(await response.read())["count"])

    async def tokenize(self, messages: Sequence[Mapping[str, Any]], model: str) -> list[int] | None:
        """The ids that the engine makes of ``messages`` and the beginning of a reply; ``None`` when
        it does not tell. Raises :class:`ApiError`."""
        body = {"model": model, "messages": messages, "add_generation_prompt": True}
        response = await self.post(TOKENIZE, orjson.dumps(body), "tokenize")
        if response.status != 200:
            failure = await refusal(response)
            if failure.status < 500 or response.status in _NO_ROUTE:
                return None
            raise failure
        with _told("the engine's token ids"):
            ids: list[int] | None = orjson.loads(await response.read()).get("tokens")
            return ids

    async def healthy(self) -> bool:
        try:
            response = await self._connections.request("GET", HEALTH, timeout_s=_HEALTH_TIMEOUT_S)
            await response.read()
        except (*_CONNECTION_ERRORS, ApiError):  # ApiError: it has been removed meanwhile
            return False
        return response.status == 200

    @property
    def connection_epoch(self) -> int:
        """See :attr:`proxy.engine_connections.EngineConnections.connection_epoch`."""
        return self._connections.connection_epoch

    async def fingerprint(self) -> str | None:
        """What the engine says of the weights that it serves; ``None`` when it says nothing.

        Raises :class:`ApiError` when it could not say, and ``TimeoutError``.
        """
        for path, name in _FINGERPRINTS:
            with _told("what the engine says of its weights"):
                told = await self._say(path)
                if isinstance(told, dict) and isinstance(fingerprint := told.get(name), str):
                    return fingerprint
        return None

    async def _say(self, path: str) -> Any:
        """The JSON that the engine answers; ``None`` when it has no such route."""
        response = await self._connections.request("GET", path)
        try:
            body = await response.read()
        finally:
            response.close()
        if response.status in _NO_ROUTE:
            return None
        if response.status != 200:
            raise ValueError(f"{path} answered {response.status}")
        return orjson.loads(body)

    @property
    def _connections(self) -> EngineConnections:
        if self._http is None:
            raise ApiError("overloaded", "the proxy is starting or stopping", status=503)
        return self._http


class EngineStream:
    """One reply, whose events go to a sink as they arrive."""

    def __init__(
        self, upstream: Upstream, request: EngineRequest, reply: EngineReply, call_id: str
    ) -> None:
        self._upstream = upstream
        self._request = request
        self._reply = reply
        self._call_id = call_id
        self._sse = SseParser()
        self._response: EngineReplied | None = None
        self._failure: ApiError | None = None
        self._over = False

    async def open(self, connection_epoch: int | None = None) -> None:
        """Sends the request. Raises :class:`ApiError` when the engine refuses or is not there, and
        :class:`bridle.proxy.engines.connections.ConnectionEpochOver` outside of
        ``connection_epoch``."""
        request, upstream = self._request, self._upstream
        self._response = await upstream.post(
            request.path, request.body, self._call_id, connection_epoch
        )
        if self._response.status != 200:
            refused = await refusal(self._response)
            if _NO_ROOM in refused.message and request.sampling.get("max_tokens") != 0:
                told = "The prompt leaves no room for a reply."
                raise ApiError("context_overflow", told, status=400)
            raise refused

    async def follow(self, sink: Sink) -> None:
        """Returns when the reply is whole and ``sink`` has all of its events.

        Raises :class:`ApiError`, after all events that came before the fault, and what ``sink``
        raises.
        """
        assert self._response is not None, "open() first"  # noqa: S101 - a programming error
        try:
            if self._request.stream:
                await self._follow(self._response, sink)
            else:
                sink(self._whole(await self._response.read()))
        except _CONNECTION_ERRORS as error:
            raise connection_error(error) from error
        if self._failure is not None:
            raise self._failure

    async def _follow(self, response: EngineReplied, sink: Sink) -> None:
        feed, read = self._sse.feed, self._streamed

        def arrived(chunk: bytes) -> asyncio.Future[Any] | None:
            events = read(feed(chunk))
            if self._over:
                response.leave()
            return sink(events) if events else None

        await response.follow(arrived)
        if not self._over:
            self._over = True
            sink(read(self._sse.finish()))

    def close(self) -> None:
        """Closes the connection unless the reply is over, by which the engine stops generating."""
        if self._response is not None and (self._failure is not None or not self._over):
            self._response.close()

    def _whole(self, body: bytes) -> list[Event]:
        self._over = True
        events = self._reply.events(body)
        try:
            events += self._reply.last_events()
        except ApiError as failure:
            self._failure = failure
        return events

    def _streamed(self, payloads: list[bytes]) -> list[Event]:
        """Events of ``payloads``, and of the end when the stream is over with them."""
        events: list[Event] = []
        try:
            for payload in payloads:
                if payload == _DONE:
                    self._over = True
                    break
                events += self._reply.events(payload)
            if self._over:
                events += self._reply.last_events()
        except ApiError as failure:
            self._over = True
            self._failure = failure
        return events


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Reads ``what`` off the engine. Raises :class:`ApiError` when that fails."""
    try:
        yield
    except _CONNECTION_ERRORS as error:
        raise connection_error(error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ApiError("upstream_error", f"{what} cannot be read", status=502) from error


def connection_error(error: Exception) -> ApiError:
    """What went wrong on the way to the engine, in neutral terms and without its address."""
    if isinstance(error, TimeoutError):
        return ApiError("upstream_timeout", "the engine did not answer in time", status=504)
    if isinstance(error, ConnectionFailed):
        return ApiError("upstream_unreachable", "the engine cannot be reached", status=502)
    return ApiError("upstream_error", "the engine's connection broke in the reply", status=502)


async def refusal(response: EngineReplied) -> ApiError:
    """The engine's error response as an :class:`ApiError`."""
    try:
        body = await response.read()
    except _CONNECTION_ERRORS as error:
        return connection_error(error)
    status = response.status
    if 300 <= status < 400:
        told = "the engine redirects: the proxy must be given the address that it leads to"
        return ApiError("upstream_error", told, status=500)
    message, param = _engine_message(body)
    wait = _seconds(response.headers.get("retry-after"))
    if status in (400, 413, 422):
        kind = "context_overflow" if _OVERFLOW.search(message) else "invalid_request"
        return ApiError(kind, message, status=400, param=param)
    if status == 404:
        return ApiError("not_found", message, status=404, param=param)
    if status == 429:
        return ApiError("rate_limit", message, status=429, retry_after=wait)
    if status == 503:
        return ApiError("overloaded", message, status=503, retry_after=wait)
    if status in (401, 403):
        message = "the engine refused the proxy's own key"
    return ApiError("upstream_error", message, status=max(status, 500), retry_after=wait)


def _engine_message(body: bytes) -> tuple[str, str | None]:
    try:
        error = orjson.loads(body)
        error = error.get("error", error)
        if isinstance(error, str):
            return error, None
        param = error.get("param")
        return str(error.get("message") or "the engine gave no reason"), (
            param if isinstance(param, str) else None
        )
    except (ValueError, AttributeError):
        return "the engine refused the request without a readable reason", None


def _seconds(retry_after: str | None) -> float | None:
    """``None`` for a date and for what is no time to wait: ``inf`` and ``nan`` are floats, too."""
    try:
        seconds = float(retry_after or "nan")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
