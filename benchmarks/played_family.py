"""An engine that replies to any harness as a model of a family writes.

It has vLLM's routes and shapes. It renders a request by the family's own template, or takes the
given ids of an exactly continued prompt. A scripted policy decides the reply; its ids are those of
the text that the template writes for it, and of the family's end token. The parsed reply goes out
beside the ids, as from an engine that has a parser for the family.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bridle.bench.families import Family
from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.scripted import ScriptedReply, ScriptedRequest
from bridle.engine.serve.backend import SamplingParams
from bridle.engine.serve.wire import DONE, event, usage

LONGEST: Final = 1 << 20
_HEAD: Final = {"id": "chatcmpl-1", "created": 1, "model": "policy"}

Policy = Callable[[ScriptedRequest], ScriptedReply]


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


@dataclass(slots=True)
class PlayedFamily:
    """A model of a family whose replies a policy decides."""

    tokenizer: Tokenizer
    family: Family
    policy: Policy
    refusals: list[str] = field(default_factory=list)
    """The messages of the template for the requests that it refused."""

    @property
    def thinks(self) -> bool:
        return "think" in self.tokenizer.chat_template_source.lower()

    def answer(self, body: Mapping[str, Any]) -> Answer:
        """Return the reply to a chat request.

        Raise :class:`TemplateError` if the template refuses its messages.
        """
        messages, tools = body["messages"], body.get("tools") or []
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if given is None:
            kwargs = body.get("chat_template_kwargs") or {}
            given = self.tokenizer.encode(self.tokenizer.render(messages, tools, **kwargs))
        sampling = SamplingParams(max_tokens=LONGEST)
        reply = self.policy(ScriptedRequest(messages, tools, given, sampling, self.tokenizer))
        message = self._message(reply, messages)
        return Answer(given, self._sampled(messages, tools, message, given), message)

    def _message(
        self, reply: ScriptedReply, messages: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.content or None}
        if self.thinks and reply.reasoning:
            message["reasoning"] = reply.reasoning
        before = sum(len(one.get("tool_calls") or ()) for one in messages)
        if reply.tool_calls:
            message["tool_calls"] = [
                {
                    "id": self._call_id(before + n, call.name),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _text(call.arguments)},
                }
                for n, call in enumerate(reply.tool_calls)
            ]
        return message

    def _call_id(self, number: int, name: str) -> str:
        match self.family.call_ids:
            case "nine":
                return f"aB{number:07d}"
            case "counted":
                return f"functions.{name}:{number}"
            case _:
                return f"chatcmpl-tool-{number:032d}"

    def _sampled(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
        prompt_ids: Sequence[int],
    ) -> list[int]:
        shown = self._written(messages, tools, message)
        reasoning = message.get("reasoning")
        if reasoning and reasoning.strip() not in shown:
            opened = self.tokenizer.decode(prompt_ids[-16:]).rstrip().endswith("<think>")
            shown = f"{'' if opened else '<think>' + chr(10)}{reasoning}\n</think>\n\n{shown}"
        called = message.get("tool_calls")
        end = self.family.call_end if called else self.family.text_end
        end_id = self.tokenizer.token_id(end or self.family.eos[0])
        assert end_id is not None
        return [*self.tokenizer.encode(shown), end_id]

    def _written(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
    ) -> str:
        """Return the reply as the template writes it, without its end tokens."""
        # The rendering of a long history by itself shows the same reply.
        asked = next((n for n, one in enumerate(messages) if one["role"] == "user"), 0)
        history = [*messages[: asked + 1]]
        try:
            before = self.tokenizer.render(history, tools)
            whole = self.tokenizer.render([*history, message], tools, add_generation_prompt=False)
        except TemplateError:
            return _in_hermes(message)
        start = next(
            (n for n, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b),
            min(len(whole), len(before)),
        )
        text = whole[start:].rstrip()
        family = self.family
        ends = [*family.eos, family.call_end, family.text_end, family.earlier_end]
        while closed := next((end for end in ends if end and text.endswith(end)), None):
            text = text.removesuffix(closed).rstrip()
        names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        # A template that shows no calls leaves the policy to write some all the same.
        return text if all(name in text for name in names) else _in_hermes(message)


def app_of(model: PlayedFamily) -> Starlette:
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


def _in_hermes(message: Mapping[str, Any]) -> str:
    calls = [
        {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls") or ()
    ]
    written = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    return "\n".join([*([message["content"]] if message["content"] else []), *written])


def _text(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
