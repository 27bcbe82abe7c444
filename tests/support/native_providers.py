"""Stubs of providers that speak their own dialects and enforce the rules that they publish.

Each calls a tool with thinking in five turns, then answers, and refuses what the provider refuses.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.asgi import read_body

from bridle.engine.serve.transport import ServerThread

TURNS = 6
KEY = "the-key-at-the-provider"

Json = dict[str, Any]


@dataclass
class Asked:
    """One request as it came."""

    path: str
    """The path with its query."""
    headers: dict[str, str]
    body: bytes


@dataclass
class Reply:
    """A response. Its pieces are sent one by one; ``cut`` breaks the connection after them."""

    pieces: list[bytes]
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    held: threading.Event | None = None
    """Awaited before the last piece is sent."""

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


Serve = Callable[[Asked], Reply]


class NativeProvider(ServerThread):
    """A server that answers by ``serve``, which a test may replace."""

    def __init__(self, serve: Serve) -> None:
        self.serve = serve
        self.asked: list[Asked] = []
        self.replied: list[Reply] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self._app(scope, receive, send)

        super().__init__(app, host="127.0.0.1", port=0)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = await read_body(receive)
        query = scope["query_string"].decode()
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        asked = Asked(scope["path"] + (f"?{query}" if query else ""), headers, body)
        self.asked.append(asked)
        reply = self.serve(asked)
        self.replied.append(reply)
        fields = {"content-type": reply.content_type, "x-request-id": "req_theirs"} | reply.headers
        if reply.cut:
            fields["content-length"] = str(len(reply.body) + 100)
        sent = [(name.encode(), value.encode()) for name, value in fields.items()]
        start = {"type": "http.response.start", "status": reply.status, "headers": sent}
        await send(start)
        for piece in reply.pieces:
            if reply.held is not None and piece is reply.pieces[-1]:
                await asyncio.to_thread(reply.held.wait, 30)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def events(payloads: list[Json], *, typed: bool = True, end: str = "\n\n") -> list[bytes]:
    """Return server-sent events, cut in odd places."""
    named = [
        (f"event: {one['type']}\n" if typed else "") + f"data: {json.dumps(one)}{end}"
        for one in payloads
    ]
    whole = "".join(named).encode()
    return [whole[at : at + 37] for at in range(0, len(whole), 37)]


def stream(pieces: list[bytes]) -> Reply:
    return Reply(pieces, content_type="text/event-stream; charset=utf-8")


def refusal(status: int, error: Json, **headers: str) -> Reply:
    return Reply([json.dumps(error).encode()], status, headers=headers)


def arguments(asked: Asked, step: int) -> Json:
    """Return the arguments of a call: the step, and the name of what runs in the background."""
    named = re.findall(rb"session ID (\d+)", asked.body)
    return {"step": step, "session_id": int(named[0])} if named else {"step": step}


# -- Anthropic ---------------------------------------------------------------------------------


def anthropic_refusal(message: str, status: int = 400) -> Reply:
    error = {"type": "invalid_request_error", "message": message}
    return refusal(status, {"type": "error", "error": error, "request_id": "req_1"})


def anthropic_rule(asked: Asked, body: Json) -> str | None:
    """Return what is wrong with a request by the rules of extended thinking with tools."""
    if asked.headers.get("x-api-key") != KEY or "authorization" in asked.headers:
        return "invalid x-api-key"
    if "anthropic-version" not in asked.headers:
        return "anthropic-version: header is required"
    if "max_tokens" not in body:
        return "max_tokens: Field required"
    made: set[str] = set()
    for turn, message in enumerate(body["messages"]):
        blocks = message["content"] if isinstance(message["content"], list) else []
        kinds = [block["type"] for block in blocks]
        if message["role"] == "assistant" and "tool_use" in kinds:
            if kinds[0] not in ("thinking", "redacted_thinking"):
                return f"messages.{turn}.content.0.type: Expected `thinking`, found `{kinds[0]}`"
            step = turn // 2
            if (blocks[0].get("signature"), blocks[0].get("thinking")) != _thought(step):
                return f"messages.{turn}.content.0: `thinking` blocks cannot be modified"
            made |= {block["id"] for block in blocks if block["type"] == "tool_use"}
        answered = {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}
        if answered - made:
            return f"messages.{turn}: unexpected `tool_use_id` found in `tool_result` blocks"
    return None


def _thought(step: int) -> tuple[str, str]:
    return f"EqoBCkgIARABGAIiQ{step}/+a9==" * 8, f"Thinking of step {step}… é"


def anthropic(asked: Asked) -> Reply:
    body = json.loads(asked.body)
    if (problem := anthropic_rule(asked, body)) is not None:
        return anthropic_refusal(problem)
    if "count_tokens" in asked.path:
        return Reply([b'{"input_tokens":  41}'])
    step = sum(message["role"] == "assistant" for message in body["messages"])
    signature, thought = _thought(step)
    content: list[Json] = [{"type": "thinking", "thinking": thought, "signature": signature}]
    if step < TURNS - 1:
        call = {"type": "tool_use", "id": f"toolu_01Abc{step}XyZ", "name": "look_up"}
        content.append(call | {"input": arguments(asked, step)})
    else:
        content.append({"type": "text", "text": f"Step {step}."})
    reason = "tool_use" if step < TURNS - 1 else "end_turn"
    usage = {"input_tokens": 7, "cache_creation_input_tokens": 5, "cache_read_input_tokens": 30}
    usage |= {"output_tokens": 9}
    message: Json = {"id": f"msg_01Theirs{step}", "type": "message", "role": "assistant"}
    message |= {"model": "claude-theirs", "stop_sequence": None}
    if not body.get("stream"):
        whole = message | {"content": content, "stop_reason": reason, "usage": usage}
        return Reply([json.dumps(whole, indent=1).encode()])
    return stream(events(list(_anthropic_events(message, content, reason, usage))))


def _anthropic_events(
    message: Json, content: list[Json], reason: str, usage: Json
) -> Iterator[Json]:
    begun = message | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 1}}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(content):
        at = {"index": index}
        empty: Json = {"input": {}} if block["type"] == "tool_use" else {}
        empty |= {"thinking": "", "signature": ""} if block["type"] == "thinking" else {}
        empty |= {"text": ""} if block["type"] == "text" else {}
        yield {"type": "content_block_start", **at, "content_block": block | empty}
        yield {"type": "ping"}
        for delta in _anthropic_deltas(block):
            yield {"type": "content_block_delta", **at, "delta": delta}
        yield {"type": "content_block_stop", **at}
    delta = {"stop_reason": reason, "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 9}}
    yield {"type": "message_stop"}


def _anthropic_deltas(block: Json) -> Iterator[Json]:
    if block["type"] == "thinking":
        for piece in (block["thinking"][:4], block["thinking"][4:]):
            yield {"type": "thinking_delta", "thinking": piece}
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif block["type"] == "tool_use":
        text = json.dumps(block["input"])
        for piece in ("", text[:5], text[5:]):
            yield {"type": "input_json_delta", "partial_json": piece}
    else:
        yield {"type": "text_delta", "text": block["text"]}


# -- OpenAI Responses --------------------------------------------------------------------------


def openai_rule(asked: Asked, body: Json) -> str | None:
    if asked.headers.get("authorization") != f"Bearer {KEY}":
        return "Incorrect API key provided"
    if "max_tokens" in body:
        return "Unsupported parameter: 'max_tokens'."
    items = body["input"] if isinstance(body["input"], list) else []
    for position, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "function_call" and not body.get("previous_response_id"):
            before = items[position - 1]
            if before.get("type") != "reasoning":
                return (
                    f"Item '{item['id']}' of type 'function_call' was provided without its required"
                    " 'reasoning' item"
                )
        if kind == "reasoning" and item["encrypted_content"] != _sealed(item["id"]):
            return f"The encrypted content for item {item['id']} could not be verified."
    return None


def _sealed(identifier: str) -> str:
    return f"gAAAAAB{identifier}-_" * 20


class OpenAI:
    """OpenAI's Responses, with what it holds of earlier responses."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}

    def __call__(self, asked: Asked) -> Reply:
        body = json.loads(asked.body)
        previous = body.get("previous_response_id")
        problem = openai_rule(asked, body)
        if previous is not None and previous not in self.steps:
            problem = f"Previous response with id '{previous}' not found."
        if problem is not None:
            error = {"message": problem, "type": "invalid_request_error", "param": "input"}
            return refusal(400, {"error": error | {"code": None}})
        items = body["input"] if isinstance(body["input"], list) else []
        step = sum(item.get("type") == "function_call" for item in items)
        if previous is not None:
            step = self.steps[previous] + 1
        thought = f"rs_68c0{step}ffee"
        summary = [{"type": "summary_text", "text": f"Thinking of step {step}."}]
        output: list[Json] = [
            {
                "id": thought,
                "type": "reasoning",
                "summary": summary,
                "encrypted_content": _sealed(thought),
            }
        ]
        if step < TURNS - 1:
            call = {
                "id": f"fc_68c0{step}",
                "type": "function_call",
                "call_id": f"call_Theirs{step}",
            }
            call |= {"name": "look_up", "arguments": json.dumps(arguments(asked, step))}
            output.append(call | {"status": "completed"})
        else:
            text = {
                "type": "output_text",
                "text": f"Step {step}.",
                "annotations": [],
                "logprobs": [],
            }
            said = {"id": f"msg_68c0{step}", "type": "message", "role": "assistant"}
            output.append(said | {"content": [text], "status": "completed"})
        identifier = f"resp_68c0{step}{'ab' * 20}"
        self.steps[identifier] = step
        return self._reply(body, output, identifier)

    def _reply(self, body: Json, output: list[Json], identifier: str) -> Reply:
        usage = {"input_tokens": 40, "input_tokens_details": {"cached_tokens": 30}}
        usage |= {"output_tokens": 9, "output_tokens_details": {"reasoning_tokens": 4}}
        whole: Json = {"id": identifier, "object": "response", "created_at": 1, "error": None}
        whole |= {"model": "gpt-theirs", "parallel_tool_calls": True, "tool_choice": "auto"}
        whole |= {"tools": body.get("tools", []), "incomplete_details": None}
        done = whole | {
            "output": output,
            "status": "completed",
            "usage": usage | {"total_tokens": 49},
        }
        if not body.get("stream"):
            return Reply([json.dumps(done, indent=2).encode()])
        made: list[Json] = [{"type": "response.created", "response": whole | {"output": []}}]
        for index, item in enumerate(output):
            at = {"output_index": index}
            made.append({"type": "response.output_item.added", **at, "item": _begun(item)})
            made += [one | at | {"item_id": item["id"]} for one in _openai_deltas(item)]
            made.append({"type": "response.output_item.done", **at, "item": item})
        made.append({"type": "response.completed", "response": done})
        for number, one in enumerate(made):
            one["sequence_number"] = number
        return stream(events(made))


def _begun(item: Json) -> Json:
    empty: Json = {"arguments": ""} if item["type"] == "function_call" else {}
    empty |= {"summary": []} if item["type"] == "reasoning" else {}
    empty |= {"content": []} if item["type"] == "message" else {}
    return item | empty


def _openai_deltas(item: Json) -> list[Json]:
    if item["type"] == "function_call":
        whole = item["arguments"]
        kind = "response.function_call_arguments.delta"
        return [{"type": kind, "delta": piece} for piece in (whole[:4], whole[4:])]
    if item["type"] == "message":
        part = item["content"][0]
        first = {"type": "response.content_part.added", "content_index": 0}
        delta = {"type": "response.output_text.delta", "content_index": 0, "logprobs": []}
        return [first | {"part": part | {"text": ""}}, delta | {"delta": part["text"]}]
    return []


# -- Gemini ------------------------------------------------------------------------------------


def gemini_rule(asked: Asked, body: Json) -> str | None:
    if asked.headers.get("x-goog-api-key") != KEY or "authorization" in asked.headers:
        return "API key not valid. Please pass a valid API key."
    if "key=" in asked.path:
        return "the key of the client came through"
    step = 0
    for content in body["contents"]:
        calls = [part for part in content["parts"] if "functionCall" in part]
        if content["role"] == "model" and calls:
            if calls[0].get("thoughtSignature") != _signed(step):
                return "Function call is missing a thought_signature in functionCall parts."
            step += 1
    return None


def _signed(step: int) -> str:
    return base64.b64encode(f"the thought of step {step}. ".encode() * 9).decode()


def gemini(asked: Asked) -> Reply:
    body = json.loads(asked.body)
    if (problem := gemini_rule(asked, body)) is not None:
        error = {"code": 400, "message": problem, "status": "INVALID_ARGUMENT"}
        return refusal(400, {"error": error})
    if "countTokens" in asked.path:
        return Reply([b'{ "totalTokens": 41 }'])
    step = sum(
        any("functionCall" in part for part in content["parts"]) for content in body["contents"]
    )
    parts: list[Json] = [{"text": f"Thinking of step {step}.", "thought": True}]
    if step < TURNS - 1:
        call = {"name": "look_up", "args": arguments(asked, step)}
        parts.append({"functionCall": call, "thoughtSignature": _signed(step)})
    else:
        parts += [{"text": "Step "}, {"text": f"{step}."}]
    usage = {"promptTokenCount": 40, "candidatesTokenCount": 5, "thoughtsTokenCount": 4}
    usage |= {"cachedContentTokenCount": 30, "totalTokenCount": 49}
    last = {"usageMetadata": usage, "modelVersion": "gemini-theirs", "responseId": f"r{step}"}
    if "streamGenerateContent" not in asked.path:
        candidate = {"content": {"role": "model", "parts": parts}, "finishReason": "STOP"}
        return Reply([json.dumps({"candidates": [candidate | {"index": 0}]} | last).encode()])
    chunks: list[Json] = [
        {"candidates": [{"content": {"role": "model", "parts": [part]}, "index": 0}]}
        for part in parts
    ]
    chunks[-1]["candidates"][0]["finishReason"] = "STOP"
    chunks[-1] |= last
    if "alt=sse" in asked.path:
        return stream(events(chunks, typed=False, end="\r\n\r\n"))
    return Reply([json.dumps(chunks, indent=1).encode()])


SERVE: dict[str, Callable[[], Serve]] = {
    "messages": lambda: anthropic,
    "responses": OpenAI,
    "google": lambda: gemini,
}
"""Makes a provider's :data:`Serve`, by dialect."""
