"""Google's Gemini API: generateContent, streamGenerateContent and countTokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from bridle.proxy.dialects.errors import google_error
from bridle.proxy.dialects.google import request as google_request
from bridle.proxy.dialects.google.request import GoogleContext
from bridle.proxy.dialects.google.stream import (
    GoogleEmitter,
    call_part,
    candidate,
    finish_reason_of,
    response_object,
    signature,
)
from bridle.proxy.wire.canonical import (
    ApiError,
    ChoiceReply,
    DialectName,
    HttpError,
    Minted,
    Reply,
    Request,
)


class GoogleDialect:
    """See ``Dialect``. The emitter knows the content type of its stream."""

    name: DialectName = "google"
    stream_content_type = "text/event-stream"
    stream_failures: frozenset[str] = frozenset()

    def parse(self, body: bytes, path: Mapping[str, str], query: Mapping[str, str]) -> Request:
        return google_request.parse(body, path, query)

    def mint(self, call_id: str, created: int, model: str) -> Minted:
        return Minted(call_id, created, f"resp_{call_id.removeprefix('call_')}", model)

    def emitter(self, request: Request, minted: Minted) -> GoogleEmitter:
        return GoogleEmitter(request, minted)

    def reply(self, request: Request, minted: Minted, reply: Reply) -> bytes:
        candidates = [
            candidate(
                index,
                _parts(request, minted, choice),
                choice.detail if request.wants.logprobs else (),
                finish_reason_of(choice.finish_reason),
            )
            for index, choice in enumerate(reply.choices)
        ]
        return orjson.dumps(response_object(minted, candidates, reply.usage))

    def error(self, error: ApiError) -> HttpError:
        return google_error(error)


def count_reply(total_tokens: int) -> bytes:
    """The answer to ``countTokens``."""
    return orjson.dumps({"totalTokens": total_tokens})


def _parts(request: Request, minted: Minted, choice: ChoiceReply) -> list[dict[str, Any]]:
    context: GoogleContext = request.context
    parts: list[dict[str, Any]] = []
    if choice.reasoning and context.thoughts:
        parts.append({"text": choice.reasoning, "thought": True})
    if choice.text:
        parts.append({"text": choice.text, "thoughtSignature": signature(minted, 0)})
    parts.extend(call_part(minted, call) for call in choice.tool_calls)
    return parts or [{"text": ""}]
