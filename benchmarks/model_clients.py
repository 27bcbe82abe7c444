"""A client of each dialect that leads a conversation step by step.

Each sends its history as harnesses do. It drops reasoning, parses arguments and writes them anew,
and refers to calls by the ids of the reply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import httpx

from bridle.bench.model_conversation import SYSTEM, TOOL, Step, result


class ClientRefused(Exception):
    """The proxy replied with an error."""


def _post(http: httpx.Client, url: str, body: dict[str, Any]) -> Any:
    reply = http.post(url, json=body)
    if reply.status_code != 200:
        raise ClientRefused(f"{reply.status_code}: {reply.text[:300]}")
    return reply.json()


def _again(arguments: str) -> str:
    return json.dumps(json.loads(arguments), separators=(",", ":"), ensure_ascii=False)


def chat(
    http: httpx.Client, url: str, steps: Sequence[Step], system: bool, *, verbatim: bool = False
) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}] if system else []
    tools = {"tools": [{"type": "function", "function": TOOL}]} if _tools(steps) else {}
    calls: list[Any] = []
    for step in steps:
        if step.user is not None:
            messages.append({"role": "user", "content": step.user})
        for call in calls:
            word = json.loads(call["function"]["arguments"])["word"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result(word)})
        body = {"model": "policy", "messages": messages, **tools}
        message = _post(http, f"{url}/v1/chat/completions", body)["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        if verbatim:
            messages.append(message)
            continue
        kept: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
        if calls:
            kept["tool_calls"] = [
                {
                    **call,
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": _again(call["function"]["arguments"]),
                    },
                }
                for call in calls
            ]
        messages.append(kept)


def responses(http: httpx.Client, url: str, steps: Sequence[Step], system: bool) -> None:
    items: list[Any] = []
    calls: list[Any] = []
    fields: dict[str, Any] = {"instructions": SYSTEM} if system else {}
    if _tools(steps):
        fields["tools"] = [{"type": "function", **TOOL, "strict": False}]
    for step in steps:
        if step.user is not None:
            items.append({"role": "user", "content": step.user})
        for call in calls:
            output = result(json.loads(call["arguments"])["word"])
            items.append(
                {"type": "function_call_output", "call_id": call["call_id"], "output": output}
            )
        body = {"model": "policy", "input": items, **fields}
        output = _post(http, f"{url}/v1/responses", body)["output"]
        calls = [item for item in output if item["type"] == "function_call"]
        items += [item for item in output if item["type"] != "reasoning"]


def messages(http: httpx.Client, url: str, steps: Sequence[Step], system: bool) -> None:
    turns: list[Any] = []
    calls: list[Any] = []
    fields: dict[str, Any] = {"system": SYSTEM} if system else {}
    if _tools(steps):
        schema = TOOL["parameters"]
        fields["tools"] = [
            {**{k: TOOL[k] for k in ("name", "description")}, "input_schema": schema}
        ]
    for step in steps:
        content: Any = step.user
        if step.user is None:
            content = [
                {
                    "type": "tool_result",
                    "tool_use_id": call["id"],
                    "content": result(call["input"]["word"]),
                }
                for call in calls
            ]
        turns.append({"role": "user", "content": content})
        body = {"model": "policy", "max_tokens": 2048, "messages": turns, **fields}
        blocks = _post(http, f"{url}/v1/messages", body)["content"]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        turns.append({"role": "assistant", "content": blocks})


def google(http: httpx.Client, url: str, steps: Sequence[Step], system: bool) -> None:
    contents: list[Any] = []
    calls: list[Any] = []
    fields: dict[str, Any] = {}
    if system:
        fields["systemInstruction"] = {"parts": [{"text": SYSTEM}]}
    if _tools(steps):
        fields["tools"] = [{"functionDeclarations": [TOOL]}]
    for step in steps:
        parts: list[Any] = [{"text": step.user}]
        if step.user is None:
            parts = [
                {
                    "functionResponse": {
                        "name": call["name"],
                        "response": {"output": result(call["args"]["word"])},
                    }
                }
                for call in calls
            ]
        contents.append({"role": "user", "parts": parts})
        path = f"{url}/v1beta/models/policy:generateContent"
        reply = _post(http, path, {"contents": contents, **fields})
        content = reply["candidates"][0]["content"]
        calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
        kept = [part for part in content["parts"] if not part.get("thought")]
        contents.append({"role": "model", "parts": kept})


def _tools(steps: Sequence[Step]) -> bool:
    return any(step.calls for step in steps)


CLIENTS: Final[dict[str, Callable[[httpx.Client, str, Sequence[Step], bool], None]]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
    "google": google,
}
