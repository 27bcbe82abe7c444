"""The engine's own tool-call ids go back to it; the client is sent minted ones."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedCall, ScriptedReply
from bridle.proxy.wire import minting
from bridle.store.records import Continuation

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def librarian(request: Any) -> Any:
    if request.messages[-1]["role"] == "user":
        calls = [ScriptedCall("look_up", {"word": word}) for word in ("one", "two")]
        return ScriptedReply(tool_calls=calls)
    return "A house."


def ask(url: str, messages: list[Any]) -> Any:
    body = {"model": "m", "messages": messages, "tools": [TOOL]}
    reply = httpx.post(f"{url}/s/ids/v1/chat/completions", json=body, timeout=30)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]


@pytest.mark.parametrize("restart", [False, True])
def test_the_engine_is_sent_its_own_ids_and_the_client_minted_ones(
    stage: Any, start_proxy: Any, restart: bool
) -> None:
    stage.play = librarian
    bench = start_proxy(stage.engine.base_url, continuation=Continuation.RENDERED)
    messages: list[Any] = [{"role": "user", "content": "What is a café?"}]
    message = ask(bench.url, messages)
    minted = [call["id"] for call in message["tool_calls"]]
    assert all(minting.read(each) is not None for each in minted)
    messages += [message]
    messages += [{"role": "tool", "tool_call_id": each, "content": "12"} for each in minted]
    if restart:
        bench = start_proxy(stage.engine.base_url, continuation=Continuation.RENDERED)
    ask(bench.url, messages)
    sent = stage.engine.requests[-1].messages
    own = [call["id"] for call in sent[1]["tool_calls"]]
    assert not set(own) & set(minted)
    assert [each["tool_call_id"] for each in sent[2:]] == own
    first, second = bench.calls()
    kept = first.replies[0].tool_calls
    assert [(call.id, call.engine_id) for call in kept] == list(zip(minted, own, strict=True))
    recorded = json.loads(bench.reader.request_body(second.id))["messages"][2]
    assert recorded["tool_call_id"] == minted[0]
