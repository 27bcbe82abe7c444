"""Anthropic Messages: the API that Claude Code speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from bridle.proxy.dialects.blank import shown_text
from bridle.proxy.dialects.errors import anthropic_error
from bridle.proxy.dialects.functions import arguments_object
from bridle.proxy.dialects.messages import request as messages_request
from bridle.proxy.dialects.messages.stream import (
    MessagesEmitter,
    message_object,
    stop_reason_of,
    usage_object,
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


class MessagesDialect:
    """See :class:`bridle.proxy.wire.canonical.Dialect`."""

    name: DialectName = "messages"
    stream_content_type = "text/event-stream; charset=utf-8"
    stream_failures: frozenset[str] = frozenset()

    def parse(self, body: bytes, path: Mapping[str, str], query: Mapping[str, str]) -> Request:
        return messages_request.parse(body, counting=False)

    def parse_count(self, body: bytes) -> Request:
        """A ``/v1/messages/count_tokens`` request: only its messages and tools are of interest."""
        return messages_request.parse(body, counting=True)

    def mint(self, call_id: str, created: int, model: str) -> Minted:
        return Minted(call_id, created, f"msg_{call_id.removeprefix('call_')}", model)

    def emitter(self, request: Request, minted: Minted) -> MessagesEmitter:
        return MessagesEmitter(minted)

    def reply(self, request: Request, minted: Minted, reply: Reply) -> bytes:
        choice = reply.choices[0] if reply.choices else ChoiceReply()
        usage = reply.usage
        stop_reason = stop_reason_of(
            choice.finish_reason, choice.stop_sequence, bool(choice.tool_calls)
        )
        return orjson.dumps(
            message_object(
                minted,
                content=_content(minted, choice),
                stop_reason=stop_reason,
                stop_sequence=choice.stop_sequence if stop_reason == "stop_sequence" else None,
                usage=usage_object(usage.prompt_tokens, usage.completion_tokens)
                if usage
                else usage_object(0, 0),
            )
        )

    def error(self, error: ApiError) -> HttpError:
        return anthropic_error(error)


def count_reply(input_tokens: int) -> bytes:
    """The answer to ``/v1/messages/count_tokens``."""
    return orjson.dumps({"input_tokens": input_tokens})


def _content(minted: Minted, choice: ChoiceReply) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    if choice.reasoning:
        signature = minted.signature(0)
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": signature})
    if text := shown_text(choice):
        content.append({"type": "text", "text": text})
    for call in choice.tool_calls:
        given = arguments_object(call.arguments)
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return content
