"""The call that resumes an interrupted turn does the work, under other tools as well."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedCall, ScriptedReply
from bridle.reconstruct.audit import audit_session
from bridle.store.records import CallKind, CallStatus

SYSTEM = "You add numbers."
NOON = "You add numbers. It is noon."
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
ADD = ScriptedCall("add", {"a": 1})


def play(request: Any) -> ScriptedReply:
    last = request.messages[-1]
    if last["role"] == "tool":
        return ScriptedReply(
            "Now let me think of it for a while. " * 3, tool_calls=(ADD,), delay=0.01
        )
    if "go on" in str(last["content"]):
        return ScriptedReply("The sum is four.")
    return ScriptedReply("I add.", tool_calls=(ADD,))


def chat(url: str, system: str, *messages: Any, tools: bool = True, cut: bool = False) -> Any:
    """Return the reply's message, or leave a stream after its first text if ``cut``."""
    said = [{"role": "system", "content": system}, *messages]
    body: dict[str, Any] = {"model": "m", "messages": said, "stream": cut}
    if tools:
        body["tools"] = [{"type": "function", "function": TOOL}]
    if not cut:
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
        return reply.json()["choices"][0]["message"]
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as reply:
        for line in reply.iter_lines():
            if '"content"' in line and json.loads(line[6:])["choices"][0]["delta"]["content"]:
                return None
    raise AssertionError("the stream had no text")


def claude(url: str, system: str, *messages: Any, tools: bool = True, cut: bool = False) -> Any:
    """Return the reply's content, or leave a stream after its first text if ``cut``."""
    body: dict[str, Any] = {"model": "m", "messages": messages, "system": system, "stream": cut}
    body["max_tokens"] = 200
    if tools:
        body["tools"] = [{"name": "add", "input_schema": TOOL["parameters"]}]
    if not cut:
        return httpx.post(f"{url}/v1/messages", json=body, timeout=30).json()["content"]
    with httpx.stream("POST", f"{url}/v1/messages", json=body, timeout=30) as reply:
        for line in reply.iter_lines():
            if "text_delta" in line:
                return None
    raise AssertionError("the stream had no text")


def chat_history(url: str) -> list[Any]:
    question = {"role": "user", "content": "How much?"}
    reply = chat(url, SYSTEM, question)
    (call,) = reply["tool_calls"]
    return [question, reply, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]


def claude_history(url: str) -> list[Any]:
    question = {"role": "user", "content": "How much?"}
    reply = claude(url, SYSTEM, question)
    (call,) = [part for part in reply if part["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "3"}
    return [
        question,
        {"role": "assistant", "content": reply},
        {"role": "user", "content": [result]},
    ]


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("changed", [{"tools": False}, {"system": NOON}, {}])
@pytest.mark.parametrize(("ask", "begin"), [(chat, chat_history), (claude, claude_history)])
def test_the_answer_after_an_interrupted_turn_is_trained(
    bench: Any, stage: Any, until: Any, ask: Any, begin: Any, changed: dict[str, Any], cut: bool
) -> None:
    """The stream was cut, or its tool was stopped. The client shows neither."""
    stage.play = play
    url = f"{bench.url}/s/lamp"
    history = begin(url)
    ask(url, SYSTEM, *history, cut=cut)
    until(lambda: bench.calls()[1].status is not CallStatus.OPEN)
    resumed = {"role": "user", "content": "[Request interrupted by user] go on"}
    system, tools = changed.get("system", SYSTEM), changed.get("tools", True)
    ask(url, system, *history, resumed, tools=tools)
    first, turn, last = bench.judged()
    assert turn.status is (CallStatus.PARTIAL if cut else CallStatus.COMPLETE)
    assert (last.parent_call_id, last.kind) == (first.id, CallKind.MAIN)
    audited = audit_session(bench.reader, first.session_id)
    assert audited.clean
    assert set(audited.conservation.dropped) <= {"partial"}
    assert audited.unlinked_roots == 0
