"""A whole chat completion."""

from __future__ import annotations

from typing import Any

import msgspec

from bridle.proxy.wire.canonical import (
    ChoiceReply,
    Minted,
    Reply,
    Request,
    ToolCall,
    Usage,
    plain_ids,
)


def write(request: Request, minted: Minted, reply: Reply) -> bytes:
    choices: list[dict[str, Any]] = []
    for index, choice in enumerate(reply.choices):
        choices.append(_choice(index, choice, request))
    whole: dict[str, Any] = {
        "id": minted.response_id,
        "object": "chat.completion",
        "created": minted.created,
        "model": minted.model,
        "choices": choices,
    }
    if reply.usage is not None:
        whole["usage"] = usage_object(reply.usage)
    if request.wants.token_ids:
        whole["prompt_token_ids"] = plain_ids(reply.prompt_token_ids)
    return msgspec.json.encode(whole)


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function, **call.own_extra}


def _choice(index: int, choice: ChoiceReply, request: Request) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if choice.tool_calls and not choice.text else choice.text,
        "refusal": None,
    }
    if choice.reasoning and request.wants.reasoning:
        message["reasoning"] = message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [_tool_call(call) for call in choice.tool_calls]
    if choice.opaque:
        message.update(choice.opaque)
    shown: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": {"content": choice.detail, "refusal": None} if request.wants.logprobs else None,
        "finish_reason": choice.finish_reason,
    }
    if request.wants.token_ids:
        shown["token_ids"] = choice.token_ids
    return shown
