"""A whole Messages reply, and the parts that it shares with a streamed one."""

from __future__ import annotations

import orjson

from bridle.proxy.dialects.blank import shown_text
from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.functions import arguments_object
from bridle.proxy.wire.canonical import ChoiceReply, FinishReason, Minted, Reply, Request


def write(request: Request, minted: Minted, reply: Reply) -> bytes:
    """Return the ``message`` object, as JSON."""
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
        usage=usage_object(usage.prompt_tokens, usage.completion_tokens)
        if usage
        else usage_object(0, 0),
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
        "usage": usage,
    }


def usage_object(input_tokens: int, output_tokens: int) -> Json:
    """Return the usage, with all input counted as ``input_tokens``.

    Harnesses add the cache fields to it, and the sum decides when they compact.
    """
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
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
        content.append({"type": "text", "text": text})
    for call in choice.tool_calls:
        given = arguments_object(call.arguments)
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return content
