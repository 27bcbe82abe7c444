"""A whole Messages reply, and the parts that it shares with a streamed one."""

from __future__ import annotations

import orjson

from bridle.proxy.dialects.blank import shown_text
from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.functions import arguments_object
from bridle.proxy.wire.canonical import (
    ChoiceReply,
    FinishReason,
    Minted,
    Reply,
    Request,
    Usage,
)


def write(request: Request, minted: Minted, reply: Reply) -> bytes:
    choice = reply.choices[0] if reply.choices else ChoiceReply()
    usage = reply.usage
    stop_reason = stop_reason_of(
        choice.finish_reason, choice.stop_sequence, bool(choice.tool_calls)
    )
    whole = message_object(
        minted,
        content=_content(minted, choice),
        stop_reason=stop_reason,
        stop_sequence=choice.stop_sequence if stop_reason == "stop_sequence" else None,
        usage=usage_object(usage or Usage(0, 0)),
    )
    return orjson.dumps(whole)


def count(input_tokens: int) -> bytes:
    """Return the reply to ``/v1/messages/count_tokens``."""
    return orjson.dumps({"input_tokens": input_tokens})


def message_object(
    minted: Minted,
    *,
    content: list[Json],
    stop_reason: str | None,
    stop_sequence: str | None,
    usage: Json,
) -> Json:
    return {
        "id": minted.response_id,
        "type": "message",
        "role": "assistant",
        "model": minted.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "stop_details": None,
        "usage": usage,
        "container": None,
    }


def usage_object(usage: Usage) -> Json:
    """Return the usage; what the engine's cache served is not among ``input_tokens``.

    Harnesses add the cache fields to it, and the sum decides when they compact.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation": None,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


def text_block(text: str) -> Json:
    return {"type": "text", "text": text, "citations": None}


def call_block(identifier: str, name: str, given: Json) -> Json:
    return {
        "type": "tool_use",
        "id": identifier,
        "name": name,
        "input": given,
        "caller": {"type": "direct"},
    }


def stop_reason_of(
    reason: FinishReason | None, stop_sequence: str | None, called_tools: bool
) -> str:
    """Return Anthropic's stop reason.

    Engines report ``stop`` also after a call that ``tool_choice`` forced.
    """
    if reason == "length":
        return "max_tokens"
    if reason == "content_filter":
        return "refusal"
    if called_tools:
        return "tool_use"
    return "stop_sequence" if stop_sequence is not None else "end_turn"


def _content(minted: Minted, choice: ChoiceReply) -> list[Json]:
    content: list[Json] = []
    if choice.reasoning:
        signature = minted.signature(0)
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": signature})
    if text := shown_text(choice):
        content.append(text_block(text))
    for call in choice.tool_calls:
        content.append(call_block(call.id, call.name, arguments_object(call.arguments)))
    return content
