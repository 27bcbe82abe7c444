"""The HTTP face of an engine: the contract's routes over a ``Backend``."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final
from uuid import uuid4

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridle.engine.contract import contract
from bridle.engine.contract.detokenizer import Vocabulary
from bridle.engine.contract.errors import ConnectionCut, RequestRefused, unknown_model
from bridle.engine.serve.backend import Backend
from bridle.engine.serve.chat import ReplyHead
from bridle.engine.serve.generation import plan_chat, plan_completion, render
from bridle.engine.serve.markup import reply_markup
from bridle.engine.serve.replies import chat_events, completion_events, whole_chat, whole_completion
from bridle.engine.serve.requests import (
    ChatBody,
    CompletionBody,
    RpcBody,
    TokenizeBody,
    check_chat,
    check_completion,
    read_body,
)
from bridle.engine.serve.transport import (
    CutResponse,
    EventStream,
    JsonResponse,
    RequesterGone,
    unless_client_leaves,
)
from bridle.web_pages import NoWebPages

logger = logging.getLogger(__name__)

RouteHandler = Callable[[Request], Awaitable[Response]]

_PAUSE_MODES: Final[dict[str, contract.PauseMode]] = {
    "keep": "keep",
    "wait": "wait",
    "abort": "abort",
}
_CLIENT_CLOSED: Final = 499


def make_app(
    backend: Backend, *, parse_thinking: bool = False, api_key: str | None = None
) -> Starlette:
    """Return the ASGI app that serves ``backend``.

    ``parse_thinking`` moves ``<think>…</think>`` into ``reasoning``. ``api_key`` is required as a
    bearer token on every route but ``/health``.
    """
    face = EngineFace(backend, parse_thinking=parse_thinking)
    routes: list[tuple[str, str, RouteHandler]] = [
        ("POST", contract.CHAT_COMPLETIONS, face.chat),
        ("POST", contract.COMPLETIONS, face.completions),
        ("POST", contract.TOKENIZE, face.tokenize),
        ("GET", contract.MODELS, face.models),
        ("GET", contract.HEALTH, face.health),
        ("GET", contract.VERSION, face.version),
        ("POST", contract.PAUSE, face.pause),
        ("POST", contract.RESUME, face.resume),
        ("GET", contract.IS_PAUSED, face.is_paused),
        ("POST", contract.COLLECTIVE_RPC, face.collective_rpc),
        ("POST", contract.RESET_PREFIX_CACHE, face.reset_prefix_cache),
    ]
    return Starlette(
        routes=[
            Route(
                path, _guarded(handler, None if path == contract.HEALTH else api_key), methods=[m]
            )
            for m, path, handler in routes
        ],
        exception_handlers={Exception: _internal_error},
        # Without a key it serves this machine only, and no page that a browser shows there.
        middleware=[Middleware(NoWebPages, only_loopback=api_key is None)],
    )


class EngineFace:
    """The handlers of the routes."""

    def __init__(self, backend: Backend, *, parse_thinking: bool) -> None:
        self._backend = backend
        self._vocabulary = Vocabulary(backend.tokenizer)
        self._markup = reply_markup(backend.tokenizer, parse_thinking=parse_thinking)

    async def chat(self, request: Request) -> Response:
        body = read_body(ChatBody, await request.body())
        self._check_model(body.model)
        check_chat(body)
        plans = plan_chat(body, self._backend, self._vocabulary, self._markup)
        head = self._head("chatcmpl", request)
        headers = {"x-request-id": _request_id(request)}
        if body.stream:
            events = chat_events(body, head, plans, self._backend, self._vocabulary)
            return EventStream(await _primed(events), headers)
        whole = whole_chat(body, head, plans, self._backend, self._vocabulary)
        reply = await unless_client_leaves(request.receive, whole)
        return JsonResponse(reply, headers=headers)

    async def completions(self, request: Request) -> Response:
        body = read_body(CompletionBody, await request.body())
        self._check_model(body.model)
        prompts = check_completion(body)
        plans = plan_completion(body, prompts, self._backend, self._vocabulary)
        head = self._head("cmpl", request)
        headers = {"x-request-id": _request_id(request)}
        if body.stream:
            events = completion_events(body, head, plans, self._backend, self._vocabulary)
            return EventStream(await _primed(events), headers)
        whole = whole_completion(body, head, plans, self._backend, self._vocabulary)
        reply = await unless_client_leaves(request.receive, whole)
        return JsonResponse(reply, headers=headers)

    async def tokenize(self, request: Request) -> Response:
        body = read_body(TokenizeBody, await request.body())
        self._check_model(body.model)
        if body.messages is not None:
            text = render(self._backend.tokenizer, body, body.messages)
        elif body.prompt is not None:
            text = body.prompt
        else:
            raise RequestRefused("`prompt` or `messages` must be given.", param="prompt")
        special = body.messages is None
        if body.add_special_tokens is not None:
            special = body.add_special_tokens
        tokens = self._backend.tokenizer.encode(text, add_special_tokens=special)
        return JsonResponse(
            {
                "count": len(tokens),
                "max_model_len": self._backend.card.max_model_len,
                "tokens": tokens,
            }
        )

    async def models(self, request: Request) -> Response:
        card = self._backend.card
        return JsonResponse(
            {
                "object": "list",
                "data": [
                    {
                        "id": card.id,
                        "object": "model",
                        "created": int(time.time()),
                        "owned_by": "bridle",
                        "root": card.root,
                        "parent": None,
                        "max_model_len": card.max_model_len,
                    }
                ],
            }
        )

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._backend.healthy else 503)

    async def version(self, request: Request) -> Response:
        return JsonResponse(
            {
                "version": "bridle",
                "policy_version": self._backend.policy_version,
                "weights_fingerprint": self._backend.weights_fingerprint,
                "samples": self._backend.samples,
                "logprobs_mode": contract.PROCESSED_LOGPROBS,
                "generation_config": contract.NEUTRAL_DEFAULTS,
                "grammars": False,
            }
        )

    async def pause(self, request: Request) -> Response:
        name = request.query_params.get("mode", "abort")
        mode = _PAUSE_MODES.get(name)
        if mode is None:
            raise RequestRefused(
                f"mode must be keep, wait or abort, got {name}.", kind="Bad Request", param="mode"
            )
        clear = request.query_params.get("clear_cache", "true").lower() in ("true", "1")
        await self._backend.pause(mode, clear)
        return JsonResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._backend.resume()
        return JsonResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return JsonResponse({"is_paused": self._backend.paused})

    async def collective_rpc(self, request: Request) -> Response:
        body = read_body(RpcBody, await request.body())
        directory = body.kwargs.get("weights_path")
        if body.method != "reload_weights" or not isinstance(directory, str):
            raise RequestRefused(
                "This engine knows one method: reload_weights with the keyword weights_path.",
                param="method",
            )
        await self._backend.reload_weights(directory)
        return JsonResponse({"results": [None]})

    async def reset_prefix_cache(self, request: Request) -> Response:
        await self._backend.reset_prefix_cache()
        return Response(status_code=200)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._backend.card.id:
            raise unknown_model(name, self._backend.card.id)

    def _head(self, prefix: str, request: Request) -> ReplyHead:
        return ReplyHead(
            f"{prefix}-{_request_id(request)}", int(time.time()), self._backend.card.id
        )


async def _primed(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Wait until the backend has admitted the request, so that a refusal keeps its status.

    Return ``events``.
    """
    await anext(events)
    return events


def _request_id(request: Request) -> str:
    """Return the client's ``X-Request-Id``, or one that is made up for this request."""
    found: str | None = getattr(request.state, "request_id", None)
    if found is None:
        found = request.headers.get("x-request-id") or uuid4().hex
        request.state.request_id = found
    return found


def _guarded(handler: RouteHandler, api_key: str | None) -> RouteHandler:
    """Return a handler that checks the key and writes refusals in the contract's shape."""

    async def handle(request: Request) -> Response:
        try:
            if api_key is not None:
                _check_key(request, api_key)
            return await handler(request)
        except RequestRefused as refusal:
            return JsonResponse(refusal.body(), status_code=refusal.status)
        except ConnectionCut:
            return CutResponse()
        except RequesterGone:
            return Response(status_code=_CLIENT_CLOSED)

    return handle


async def _internal_error(request: Request, error: Exception) -> Response:
    """Report a bug in the contract's shape.

    It is logged here, and raised again by the framework.
    """
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    refusal = RequestRefused(repr(error), status=500, kind="InternalServerError")
    return JsonResponse(refusal.body(), status_code=refusal.status)


def _check_key(request: Request, api_key: str) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), api_key.encode()):
        raise RequestRefused("Unauthorized", status=401, kind="AuthenticationError")
