"""The routes of vLLM that the proxy uses, for a model whose replies are played.

The reply of a played model has its ids and its parsed message: it goes out as from an engine that
has a parser for the family.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.serve.wire import DONE, event, usage

LONGEST: Final = 1 << 20
"""The context length that the engine reports, in tokens."""
_HEAD: Final = {"id": "chatcmpl-1", "created": 1, "model": "policy"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply in the engine's shape: the message, and the ids before and in it."""

    prompt_ids: Sequence[int]
    sampled: Sequence[int]
    message: dict[str, Any]

    @property
    def finish(self) -> str:
        return "tool_calls" if self.message.get("tool_calls") else "stop"

    @property
    def logprobs(self) -> dict[str, Any]:
        entry = {"token": "", "logprob": -0.5, "bytes": None, "top_logprobs": []}
        return {"content": [entry] * len(self.sampled)}

    @property
    def usage(self) -> dict[str, Any]:
        return usage(len(self.prompt_ids), len(self.sampled), 0)


class Played(Protocol):
    """A model whose replies are played."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def refusals(self) -> list[str]:
        """The messages of the template for the requests that it refused."""

    def answer(self, body: Mapping[str, Any]) -> Answer:
        """Return the reply to a chat request.

        Raise :class:`TemplateError` if the template refuses its messages.
        """


def app_of(model: Played) -> Starlette:
    """Return an app with the routes of vLLM that the proxy uses."""

    async def chat(request: Request) -> Response:
        body = await request.json()
        try:
            answer = model.answer(body)
        except TemplateError as error:
            model.refusals.append(str(error))
            return JSONResponse({"error": {"message": str(error), "code": 400}}, 400)
        if body.get("stream"):
            return StreamingResponse(_events(answer), media_type="text/event-stream")
        return JSONResponse(_whole(answer))

    async def tokenize(request: Request) -> Response:
        body = await request.json()
        if body.get("messages") is None:
            ids = model.tokenizer.encode(body["prompt"])
        else:
            try:
                text = model.tokenizer.render(body["messages"], body.get("tools"))
            except TemplateError as error:
                return JSONResponse({"error": {"message": str(error), "code": 400}}, 400)
            ids = model.tokenizer.encode(text)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": LONGEST})

    async def models(request: Request) -> Response:
        card = {"id": "policy", "object": "model", "max_model_len": LONGEST, "root": "policy"}
        return JSONResponse({"object": "list", "data": [card]})

    async def health(request: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )


def _whole(answer: Answer) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": answer.message,
        "token_ids": list(answer.sampled),
        "logprobs": answer.logprobs,
        "finish_reason": answer.finish,
        "stop_reason": None,
    }
    return {
        **_HEAD,
        "object": "chat.completion",
        "choices": [choice],
        "usage": answer.usage,
        "prompt_token_ids": list(answer.prompt_ids),
    }


async def _events(answer: Answer) -> AsyncGenerator[bytes]:
    head = {**_HEAD, "object": "chat.completion.chunk"}
    for delta in _deltas(answer.message):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        first = {"prompt_token_ids": list(answer.prompt_ids)} if "role" in delta else {}
        yield event({**head, "choices": [choice], **first})
    last = {
        "index": 0,
        "delta": {},
        "logprobs": answer.logprobs,
        "finish_reason": answer.finish,
        "stop_reason": None,
        "token_ids": list(answer.sampled),
    }
    yield event({**head, "choices": [last]})
    yield event({**head, "choices": [], "usage": answer.usage})
    yield DONE


def _deltas(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{key: message[key]} for key in ("reasoning", "content") if message.get(key)]
    calls = message.get("tool_calls") or ()
    return deltas + [{"tool_calls": [{"index": n, **call}]} for n, call in enumerate(calls)]
