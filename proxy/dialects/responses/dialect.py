"""OpenAI Responses: the API that Codex and the OpenAI Agents SDK speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from bridle.proxy.dialects.blank import shown_text
from bridle.proxy.dialects.errors import openai_error
from bridle.proxy.dialects.responses import request as responses_request
from bridle.proxy.dialects.responses.custom import input_text
from bridle.proxy.dialects.responses.items import (
    aligned_logprobs,
    call_item,
    message_item,
    output_text,
    reasoning_item,
)
from bridle.proxy.dialects.responses.request import ResponsesContext
from bridle.proxy.dialects.responses.stream import ResponsesEmitter, response_object, status_of
from bridle.proxy.wire.canonical import (
    ApiError,
    ChoiceReply,
    DialectName,
    HttpError,
    Minted,
    Reply,
    Request,
)


class ResponsesDialect:
    """See :class:`bridle.proxy.wire.canonical.Dialect`."""

    name: DialectName = "responses"
    stream_content_type = "text/event-stream; charset=utf-8"
    stream_failures: frozenset[str] = frozenset()

    def parse(self, body: bytes, path: Mapping[str, str], query: Mapping[str, str]) -> Request:
        return responses_request.parse(body)

    def mint(self, call_id: str, created: int, model: str) -> Minted:
        return Minted(call_id, created, f"resp_{call_id.removeprefix('call_')}", model)

    def emitter(self, request: Request, minted: Minted) -> ResponsesEmitter:
        return ResponsesEmitter(request, minted)

    def reply(self, request: Request, minted: Minted, reply: Reply) -> bytes:
        choice = reply.choices[0] if reply.choices else ChoiceReply()
        status, incomplete = status_of(choice.finish_reason)
        return response_object(
            request.context,
            minted,
            status=status,
            incomplete=incomplete,
            output=_output(request, minted, choice, status),
            usage=reply.usage,
        )

    def error(self, error: ApiError) -> HttpError:
        return openai_error(error)


def deleted(response_id: str) -> bytes:
    """The answer to ``DELETE /v1/responses/{id}``."""
    return orjson.dumps({"id": response_id, "object": "response", "deleted": True})


def _output(
    request: Request, minted: Minted, choice: ChoiceReply, status: str
) -> list[dict[str, Any]]:
    """Reasoning, text and calls as items; the last one shares the response's status."""
    context: ResponsesContext = request.context
    output: list[dict[str, Any]] = []
    text = shown_text(choice)
    parts = bool(choice.reasoning) + bool(text) + len(choice.tool_calls)

    def status_here() -> str:
        return status if len(output) == parts - 1 else "completed"

    if choice.reasoning:
        output.append(
            reasoning_item(
                minted.item_id("rs", 0),
                choice.reasoning,
                summarise=context.summarise,
                signature=minted.signature(0) if context.encrypted else None,
                status=status_here(),
            )
        )
    if text:
        detail = choice.detail if request.wants.logprobs else []
        part = output_text(text, aligned_logprobs(text, detail))
        output.append(message_item(minted.item_id("msg", len(output)), part, status_here()))
    for call in choice.tool_calls:
        custom = context.tools.name(call.name).kind == "custom"
        identifier = minted.item_id("ctc" if custom else "fc", len(output))
        given = input_text(call.arguments) if custom else None
        output.append(call_item(identifier, call, context.tools, status_here(), given))
    return output
