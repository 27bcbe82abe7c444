"""A whole Responses reply, and the parts that it shares with a streamed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from bridle.proxy.dialects.blank import shown_text
from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.responses.custom import input_text
from bridle.proxy.dialects.responses.tools import client_tool
from bridle.proxy.wire.canonical import (
    ChoiceReply,
    ClientTool,
    FinishReason,
    Minted,
    Reply,
    Request,
    ToolCall,
    Usage,
)


def write(request: Request, minted: Minted, reply: Reply) -> bytes:
    """The ``response`` object, as JSON."""
    choice = reply.choices[0] if reply.choices else ChoiceReply()
    status, incomplete = status_of(choice.finish_reason)
    return response_object(
        request,
        minted,
        status=status,
        incomplete=incomplete,
        output=_output(request, minted, choice, status),
        usage=reply.usage,
    )


def deleted(response_id: str) -> bytes:
    """The reply to ``DELETE /v1/responses/{id}``."""
    return orjson.dumps({"id": response_id, "object": "response", "deleted": True})


def response_object(
    request: Request,
    minted: Minted,
    *,
    status: str,
    output: Sequence[Json] = (),
    usage: Usage | None = None,
    error: Json | None = None,
    incomplete: str | None = None,
) -> bytes:
    """The ``response`` object with everything that the request determines, as JSON."""
    own = {
        "id": minted.response_id,
        "object": "response",
        "created_at": minted.created,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": incomplete} if incomplete is not None else None,
        "model": minted.model,
        "output": list(output),
        "usage": usage_object(usage) if usage is not None else None,
    }
    return orjson.dumps(own)[:-1] + b"," + request.responses.echo[1:]


def usage_object(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def status_of(reason: FinishReason | None) -> tuple[str, str | None]:
    """The response's status and, when incomplete, why."""
    if reason == "length":
        return "incomplete", "max_output_tokens"
    if reason == "content_filter":
        return "incomplete", "content_filter"
    return "completed", None


def reasoning_item(
    identifier: str, text: str, *, summarise: bool, signature: str | None, status: str
) -> dict[str, Any]:
    """A ``reasoning`` output item; ``text`` stands in the summary or in the content."""
    item: dict[str, Any] = {"id": identifier, "type": "reasoning", "summary": []}
    if summarise:
        item["summary"] = [{"type": "summary_text", "text": text}]
    else:
        item["content"] = [{"type": "reasoning_text", "text": text}]
    if signature is not None:
        item["encrypted_content"] = signature
    item["status"] = status
    return item


def message_item(identifier: str, part: dict[str, Any], status: str) -> dict[str, Any]:
    return {
        "id": identifier,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


def output_text(text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def call_item(
    identifier: str,
    call: ToolCall,
    tools: Mapping[str, ClientTool],
    status: str,
    text: str | None = None,
) -> dict[str, Any]:
    """A ``function_call`` or ``custom_tool_call`` output item; ``text`` is the input of a custom
    tool."""
    tool = client_tool(tools, call.name)
    item: dict[str, Any] = {"id": identifier, "type": "function_call", "status": status}
    item["call_id"] = call.id
    item["name"] = tool.name
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    if text is not None:
        item["type"] = "custom_tool_call"
        item["input"] = text
    else:
        item["arguments"] = call.arguments
    return item


def aligned_logprobs(text: str, detail: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The entries of ``detail`` whose tokens make up ``text``; all of them when none do."""
    spelled = "".join(str(entry.get("token", "")) for entry in detail)
    start = spelled.rfind(text)
    if start < 0 or not text:
        return detail
    end, position, kept = start + len(text), 0, []
    for entry in detail:
        after = position + len(str(entry.get("token", "")))
        if position < end and after > start:
            kept.append(entry)
        position = after
    return kept


def _output(request: Request, minted: Minted, choice: ChoiceReply, status: str) -> list[Json]:
    """Reasoning, text and calls as items; the last one has the response's status."""
    tools, output = request.responses.tools, list[Json]()
    text = shown_text(choice)
    parts = bool(choice.reasoning) + bool(text) + len(choice.tool_calls)

    def status_here() -> str:
        return status if len(output) == parts - 1 else "completed"

    if choice.reasoning:
        output.append(
            reasoning_item(
                minted.item_id("rs", 0),
                choice.reasoning,
                summarise=request.wants.reasoning_summary,
                signature=minted.signature(0) if request.wants.encrypted_reasoning else None,
                status=status_here(),
            )
        )
    if text:
        detail = choice.detail if request.wants.logprobs else ()
        part = output_text(text, aligned_logprobs(text, detail))
        output.append(message_item(minted.item_id("msg", len(output)), part, status_here()))
    for call in choice.tool_calls:
        custom = client_tool(tools, call.name).custom
        identifier = minted.item_id("ctc" if custom else "fc", len(output))
        given = input_text(call.arguments) if custom else None
        output.append(call_item(identifier, call, tools, status_here(), given))
    return output
