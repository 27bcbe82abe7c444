"""A proxy in front of upstreams that reply with any bytes, and its clients in every dialect."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridle.proxy.engines.weights import EngineSampling
from bridle.proxy.settings import Limits, OtherModel, ProxySettings
from bridle.proxy.wire.sse import SseParser
from support.theatre import Sent, Theatre

DIALECTS = ("chat", "completions", "responses", "messages", "google")
TOOLS = ("weather", "time", "get_weather")


@dataclass
class Call:
    """A tool call as a client read it."""

    name: str
    arguments: Any


@dataclass
class Got:
    """A reply as a client of some dialect read it."""

    status: int
    text: str = ""
    thinking: str = ""
    calls: list[Call] = field(default_factory=list)
    finish: str | None = None
    error: dict[str, Any] | None = None
    call_id: str = ""
    body: bytes = b""


class OddUpstreams(Theatre):
    """A proxy whose engine (model ``m``) and external upstream (model ``ext``) are scripted."""

    def __init__(self, directory: Path, **limits: Any) -> None:
        settings = ProxySettings(
            "http://engine",
            f"sqlite:///{directory}/bridle.db",
            model="m",
            limits=Limits(health_check_s=0, retries=0, **limits),
            other_models={"ext": OtherModel(("http://other",), "ext", None, external=True)},
        )
        super().__init__(settings, ("m", "ext"))
        for engine in self.engines:
            engine.sampling = EngineSampling("processed", True)

    def ask(
        self, sent: Sent, dialect: str, *, stream: bool, external: bool = False, tools: bool = True
    ) -> Got:
        return self.runner.run(self._ask(sent, dialect, stream, external, tools))

    def ask_all(self, asked: list[tuple[Sent, str, bool, bool]]) -> list[Got]:
        async def together() -> list[Got]:
            return await asyncio.gather(*[self._ask(*one, True) for one in asked])

        return self.runner.run(together())

    async def _ask(
        self, sent: Sent, dialect: str, stream: bool, external: bool, tools: bool
    ) -> Got:
        name = self.name(sent)
        path, query, body = request(dialect, name, "ext" if external else "m", stream, tools)
        received = await self.post(name, path, body, query)
        got = read(dialect, received.status, received.body, stream)
        got.call_id, got.body = received.call_id, received.body
        return got


def request(
    dialect: str, text: str, model: str, stream: bool, tools: bool
) -> tuple[str, bytes, dict[str, Any]]:
    """Path, query and body of a request that has ``text`` in its prompt."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    functions = [{"name": name, "parameters": schema} for name in TOOLS] if tools else []
    body: dict[str, Any] = {"model": model, "stream": stream}
    message = {"role": "user", "content": text}
    if dialect == "chat":
        body |= {"messages": [message]}
        body |= {"tools": [{"type": "function", "function": one} for one in functions]}
        return "/v1/chat/completions", b"", body
    if dialect == "completions":
        return "/v1/completions", b"", body | {"prompt": text}
    if dialect == "responses":
        made = [{"type": "function", **one} for one in functions]
        return "/v1/responses", b"", body | {"input": text, "tools": made}
    if dialect == "messages":
        made = [{"name": one["name"], "input_schema": schema} for one in functions]
        return "/v1/messages", b"", body | {"messages": [message], "max_tokens": 99, "tools": made}
    verb = "streamGenerateContent" if stream else "generateContent"
    content: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": text}]}]}
    content["generationConfig"] = {"thinkingConfig": {"includeThoughts": True}}
    content |= {"tools": [{"functionDeclarations": functions}]} if functions else {}
    return f"/v1beta/models/{model}:{verb}", b"alt=sse" if stream else b"", content


# -- how clients of each dialect read a reply ----------------------------------------------------


def read(dialect: str, status: int, body: bytes, stream: bool) -> Got:
    got = Got(status)
    if status != 200 or not stream:
        whole = json.loads(body)
        payloads = [whole]
        if status != 200 or whole.get("error"):
            got.error = whole["error"]
            return got
    else:
        parser = SseParser()
        found = [*parser.feed(body), *parser.finish()]
        payloads = [json.loads(one) for one in found if one != b"[DONE]"]
    _READERS[dialect](got, payloads, stream)
    for call in got.calls:
        if isinstance(call.arguments, str):
            try:
                call.arguments = json.loads(call.arguments or "{}")
            except ValueError:
                call.arguments = {"_invalid_json": call.arguments}
    return got


def _chat(got: Got, payloads: list[Any], stream: bool) -> None:
    for payload in payloads:
        if payload.get("error"):
            got.error = payload["error"]
            continue
        for choice in payload["choices"]:
            assert choice["index"] == 0, "a choice that was not asked for"
            said = choice["delta" if stream else "message"]
            got.text += said.get("content") or ""
            got.thinking += said.get("reasoning_content") or ""
            got.finish = choice["finish_reason"] or got.finish
            for position, call in enumerate(said.get("tool_calls") or ()):
                index = call.get("index", position)
                if index == len(got.calls):
                    got.calls.append(Call(call["function"]["name"], ""))
                got.calls[index].arguments += call["function"]["arguments"]
    if got.error and got.finish is None:
        got.calls.clear()  # clients of this dialect run calls after the finish reason


def _completions(got: Got, payloads: list[Any], stream: bool) -> None:
    for payload in payloads:
        if payload.get("error"):
            got.error = payload["error"]
            continue
        for choice in payload["choices"]:
            assert choice["index"] == 0, "a choice that was not asked for"
            got.text += choice["text"]
            got.finish = choice["finish_reason"] or got.finish


def _responses(got: Got, payloads: list[Any], stream: bool) -> None:
    open_item = None
    for payload in payloads:
        kind = payload.get("type")
        if kind == "response.output_item.added":
            assert open_item is None, "an item begins inside another"
            open_item = payload["output_index"]
        elif kind == "response.output_item.done":
            assert open_item == payload["output_index"]
            open_item = None
        elif kind and kind.endswith(".delta"):
            assert open_item == payload["output_index"], "a piece of an item that is not open"
        if kind in ("response.failed", "response.completed", "response.incomplete") or not stream:
            response = payload["response"] if stream else payload
            got.error = response["error"]
            got.finish = response["status"]
            for item in response["output"]:
                if item["type"] == "message":
                    got.text += "".join(part["text"] for part in item["content"])
                elif item["type"] == "reasoning":
                    parts = [*item.get("content", ()), *item["summary"]]
                    got.thinking += "".join(part["text"] for part in parts)
                elif item["type"] == "function_call" and item["status"] != "in_progress":
                    got.calls.append(Call(item["name"], item["arguments"]))


def _messages(got: Got, payloads: list[Any], stream: bool) -> None:
    if stream:
        _message_events(got, payloads)
        return
    (payload,) = payloads
    got.finish = payload["stop_reason"]
    for block in payload["content"]:
        got.text += block.get("text", "")
        got.thinking += block.get("thinking", "")
        if block["type"] == "tool_use":
            got.calls.append(Call(block["name"], block["input"]))


def _message_events(got: Got, payloads: list[Any]) -> None:
    block: Any = None
    pieces = ""
    for payload in payloads:
        match payload["type"]:
            case "error":
                got.error = payload["error"]
            case "content_block_start":
                assert block is None, "a block begins inside another"
                block, pieces = payload["content_block"], ""
            case "content_block_delta":
                delta = payload["delta"]
                got.text += delta.get("text", "")
                got.thinking += delta.get("thinking", "")
                pieces += delta.get("partial_json", "")
            case "content_block_stop":
                if block["type"] == "tool_use":
                    got.calls.append(Call(block["name"], pieces))
                block = None
            case "message_delta":
                got.finish = payload["delta"]["stop_reason"]


def _google(got: Got, payloads: list[Any], stream: bool) -> None:
    for payload in payloads:
        if payload.get("error"):
            got.error = payload["error"]
            continue
        for candidate in payload["candidates"]:
            assert candidate["index"] == 0, "a choice that was not asked for"
            got.finish = candidate.get("finishReason") or got.finish
            for part in candidate["content"]["parts"]:
                if "functionCall" in part:
                    call = part["functionCall"]
                    got.calls.append(Call(call["name"], call["args"]))
                elif part.get("thought"):
                    got.thinking += part["text"]
                else:
                    got.text += part["text"]


_READERS = {
    "chat": _chat,
    "completions": _completions,
    "responses": _responses,
    "messages": _messages,
    "google": _google,
}
