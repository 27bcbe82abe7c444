"""Sessions live in the store: any proxy on it continues them exactly, and memory is bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedCall, ScriptedReply
from bridle.proxy.settings import Limits

CALL = ScriptedCall("add", '{"a":1,  "b":2}')
TURNS = 6
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
RESPONSES_TOOLS = [{"type": "function", "name": "add", "parameters": SCHEMA}]
MESSAGES_TOOLS = [{"name": "add", "input_schema": SCHEMA}]


def script(request: Any) -> ScriptedReply:
    return ScriptedReply(
        f"Step {len(request.messages)}.", reasoning="one two", tool_calls=(CALL, CALL)
    )


def post(url: str, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{url}/s/lamp{path}", json={"model": "m", **body}, timeout=60)
    reply.raise_for_status()
    return reply.json()


def chat(url: str, state: dict[str, Any]) -> None:
    """One turn: what the harness kept in ``state`` goes out, the reply and its results go in."""
    messages = state.setdefault("messages", [{"role": "user", "content": "one?"}])
    reply = post(url, "/v1/chat/completions", messages=messages, tools=CHAT_TOOLS)
    message = reply["choices"][0]["message"]
    messages.append(message)
    messages += [
        {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        for call in message["tool_calls"]
    ]


def responses(url: str, state: dict[str, Any]) -> None:
    """Ask with the stored conversation: only the new items are sent."""
    previous = {"previous_response_id": state["id"]} if "id" in state else {}
    items = state.get("items", [{"role": "user", "content": "one?"}])
    reply = post(url, "/v1/responses", input=items, tools=RESPONSES_TOOLS, **previous)
    state["id"] = reply["id"]
    state["items"] = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
        for item in reply["output"]
        if item["type"] == "function_call"
    ]


def messages_api(url: str, state: dict[str, Any]) -> None:
    messages = state.setdefault("messages", [{"role": "user", "content": "one?"}])
    reply = post(url, "/v1/messages", messages=messages, tools=MESSAGES_TOOLS, max_tokens=512)
    messages.append({"role": "assistant", "content": reply["content"]})
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
        for block in reply["content"]
        if block["type"] == "tool_use"
    ]
    messages.append({"role": "user", "content": results})


TURN: dict[str, Callable[[str, dict[str, Any]], None]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages_api,
}


def check_one_exact_line(bench: Any, stage: Any) -> None:
    calls = bench.calls()
    assert len(calls) == TURNS
    assert [call.parent_call_id for call in calls[1:]] == [call.id for call in calls[:-1]]
    assert {call.break_reason for call in calls} == {None}
    for before, request in zip(calls, stage.requests[1:], strict=False):
        path = [
            *bench.reader.prompt_token_ids(before.id),
            *bench.reader.sampled(before.id)[0].token_ids,
        ]
        assert list(request.prompt_ids)[: len(path)] == path


@pytest.mark.parametrize("dialect", TURN)
def test_two_workers_on_one_store_take_turns_exactly(
    stage: Any, start_proxy: Any, model_dir: Path, dialect: str
) -> None:
    stage.play = script
    workers = [start_proxy(stage.engine.base_url, tokenizer_dir=model_dir) for _ in range(2)]
    state: dict[str, Any] = {}
    for number in range(TURNS):
        TURN[dialect](workers[number % 2].url, state)
    check_one_exact_line(workers[0], stage)


@pytest.mark.parametrize("dialect", TURN)
def test_a_restarted_proxy_continues_exactly(
    stage: Any, start_proxy: Any, model_dir: Path, dialect: str
) -> None:
    stage.play = script
    state: dict[str, Any] = {}
    for number in range(TURNS):
        if number % 3 == 0:
            bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
        TURN[dialect](bench.url, state)
        if number % 3 == 2:
            bench.server.stop()
    check_one_exact_line(bench, stage)


def test_sessions_beyond_the_capacity_leave_memory_and_come_back_exactly(
    stage: Any, start_proxy: Any, model_dir: Path
) -> None:
    stage.play = script
    bench = start_proxy(
        stage.engine.base_url, tokenizer_dir=model_dir, limits=Limits(memory_bytes=1)
    )
    state: dict[str, Any] = {}
    for number in range(TURNS):
        chat(bench.url, state)
        name = f"{bench.url}/s/other-{number}/v1/chat/completions"
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        httpx.post(name, json=body).raise_for_status()
    calls = [call for call in bench.calls() if call.parent_call_id is not None]
    assert len(calls) == TURNS - 1
    assert {call.break_reason for call in calls} == {None}
    metrics = httpx.get(f"{bench.url}/metrics").text
    assert f"bridle_sessions_read_total {TURNS - 1:.1f}" in metrics
