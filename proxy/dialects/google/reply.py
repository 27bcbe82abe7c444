"""A whole Gemini reply, and the parts that it shares with a streamed one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import orjson

from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.functions import arguments_object
from bridle.proxy.wire import minting
from bridle.proxy.wire.canonical import (
    ChoiceReply,
    Detail,
    FinishReason,
    Minted,
    Reply,
    Request,
    ToolCall,
    Usage,
    entries_of,
)

JSON_ARRAY: Final = "json_array"
"""The ``own`` of a request whose stream is one JSON array that grows, not server-sent events."""


def write(request: Request, minted: Minted, reply: Reply) -> bytes:
    """Return the ``GenerateContentResponse``, as JSON."""
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


def stream(request: Request, response: Json) -> bytes:
    """Return a whole response as a stream of one event."""
    written = orjson.dumps(response)
    return b"[%b]" % written if request.own == JSON_ARRAY else b"data: %b\n\n" % written


def count(total_tokens: int) -> bytes:
    return orjson.dumps({"totalTokens": total_tokens})


def response_object(minted: Minted, candidates: Sequence[Json], usage: Usage | None = None) -> Json:
    whole: Json = {"candidates": list(candidates)}
    if usage is not None:
        whole["usageMetadata"] = usage_object(usage)
    whole["modelVersion"] = minted.model
    whole["responseId"] = minted.response_id
    return whole


def usage_object(usage: Usage) -> Json:
    shown = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - usage.reasoning_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        shown["thoughtsTokenCount"] = usage.reasoning_tokens
    if usage.cached_tokens:
        shown["cachedContentTokenCount"] = usage.cached_tokens
    return shown


def finish_reason_of(reason: FinishReason | None) -> str:
    if reason == "length":
        return "MAX_TOKENS"
    return "SAFETY" if reason == "content_filter" else "STOP"


def candidate(
    index: int,
    parts: Sequence[Json],
    detail: Detail = (),
    finish: str | None = None,
) -> Json:
    shown: Json = {"content": {"parts": list(parts), "role": "model"}}
    if finish is not None:
        shown["finishReason"] = finish
    shown["index"] = index
    if detail:
        shown["logprobsResult"] = _logprobs(detail)
    return shown


def signature(minted: Minted, index: int) -> str:
    """Return a thought signature, which clients decode as bytes."""
    return minting.as_base64(minted.signature(index))


def call_part(minted: Minted, call: ToolCall) -> Json:
    """Return the call with a signature that names it, for clients that do not send its id back."""
    function = {"id": call.id, "name": call.name, "args": arguments_object(call.arguments)}
    minted_id = minting.read(call.id)
    index = minted_id.index if minted_id is not None else None
    return {"functionCall": function, "thoughtSignature": signature(minted, index or 0)}


def _parts(request: Request, minted: Minted, choice: ChoiceReply) -> list[Json]:
    parts: list[Json] = []
    if choice.reasoning and request.wants.reasoning:
        parts.append({"text": choice.reasoning, "thought": True})
    if choice.text:
        parts.append({"text": choice.text, "thoughtSignature": signature(minted, 0)})
    parts.extend(call_part(minted, call) for call in choice.tool_calls)
    return parts or [{"text": ""}]


class _Top(msgspec.Struct, gc=False):
    token: Any = None
    logprob: Any = None


class _Entry(_Top, gc=False):
    top_logprobs: list[_Top] | None = None


class _Candidate(msgspec.Struct, rename={"logprob": "logProbability"}, gc=False):
    token: Any
    logprob: Any


class _Tops(msgspec.Struct, rename={"top_logprobs": "candidates"}, gc=False):
    top_logprobs: list[_Candidate]


def _logprobs(detail: Detail) -> orjson.Fragment:
    entries = entries_of(detail, _Entry)
    for entry in entries:
        if entry.top_logprobs is None:
            entry.top_logprobs = []
    # One conversion of all, because a stream may bring a whole reply's entries at once.
    result = {
        "topCandidates": msgspec.convert(entries, list[_Tops], from_attributes=True),
        "chosenCandidates": msgspec.convert(entries, list[_Candidate], from_attributes=True),
    }
    return orjson.Fragment(msgspec.json.encode(result))
