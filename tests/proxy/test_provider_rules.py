"""Six turns with thinking and tools through upstreams that enforce eight providers' rules.

The official client of each dialect asks them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.support.tool_loops import (
    Ask,
    ToolLoop,
    by_chat,
    by_google,
    by_messages,
    by_responses,
)
from typer.testing import CliRunner

from bridle.cli.program import app
from bridle.proxy.settings import OtherModel
from bridle.run.deployment import examine_upstreams
from bridle.store.records import CallStatus

TURNS = 6

Asked = dict[str, Any]
Rule = Callable[[Asked, list[Asked]], str | None]
"""A function from a request and its assistant messages with calls to a refusal."""


def wants(field: str, words: str) -> Rule:
    """Return the rule that each assistant message with calls has a field somewhere."""

    def rule(_: Asked, made: list[Asked]) -> str | None:
        return None if all(f'"{field}"' in json.dumps(one) for one in made) else words

    return rule


def gpt_5(asked: Asked, _: list[Asked]) -> str | None:
    if "max_tokens" in asked:
        return (
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
            "'max_completion_tokens' instead."
        )
    if asked.get("temperature", 1) != 1:
        return "Unsupported value: 'temperature' does not support 0.5 with this model."
    return None


def mistral(asked: Asked, _: list[Asked]) -> str | None:
    for message in asked["messages"]:
        for call in message.get("tool_calls") or ():
            if not re.fullmatch("[a-zA-Z0-9]{9}", call["id"]):
                return (
                    f"Tool call id was {call['id']} but must be a-z, A-Z, 0-9, with a length of 9."
                )
        if "reasoning_content" in message:
            return "Extra inputs are not permitted: messages.1.assistant.reasoning_content"
    return None


def xai(asked: Asked, _: list[Asked]) -> str | None:
    refused = {"stop", "presence_penalty", "frequency_penalty"} & asked.keys()
    return f"Model grok does not support parameter {min(refused)}." if refused else None


THINKING = "thinking is enabled but reasoning_content is missing in assistant tool call message"
PROVIDERS: dict[str, tuple[Rule, Asked, Asked]] = {
    "deepseek": (wants("reasoning_content", f"The {THINKING}"), {"reasoning_content": "…"}, {}),
    "kimi": (wants("reasoning_content", THINKING), {"reasoning_content": "…"}, {}),
    "minimax": (
        wants("reasoning_details", "invalid params, reasoning_details is missing"),
        {"reasoning_details": [{"type": "reasoning.text", "text": "…"}]},
        {},
    ),
    "openrouter": (
        wants("reasoning_details", "Reasoning is required: reasoning_details"),
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "AbC=", "index": 0}]},
        {},
    ),
    "gemini": (
        wants("thought_signature", "Function call is missing a thought_signature"),
        {},
        {"extra_content": {"google": {"thought_signature": "c2ln"}}},
    ),
    "gpt-5": (gpt_5, {}, {}),
    "mistral": (mistral, {}, {}),
    "xai": (xai, {"reasoning_content": "…"}, {}),
}
"""The rule of each provider, and what its messages and its calls have beside the usual fields."""


class Provider:
    """An upstream that calls a tool five times, then answers, and refuses by its rule."""

    def __init__(self, raw: Any, name: str) -> None:
        self._raw = raw
        self._rule, self._message, self._call = PROVIDERS[name]
        self.refused: list[str] = []
        raw.answer = self.answer

    async def answer(self, _receive: Any, send: Any) -> None:
        asked = json.loads(self._raw.bodies[-1])
        old = [one for one in asked["messages"] if one["role"] == "assistant"]
        refusal = self._rule(asked, [one for one in old if one.get("tool_calls")])
        if refusal is not None:
            self.refused.append(refusal)
            await _send(send, 400, {"error": {"message": refusal, "type": "invalid_request_error"}})
            return
        message: Asked = {"role": "assistant", "content": f"Step {len(old)}."}
        if len(old) < TURNS - 1:
            step = {"name": "look_up", "arguments": json.dumps({"step": len(old)})}
            call = {"id": f"theirs{len(old):03}", "type": "function", "function": step}
            message |= {"tool_calls": [call | self._call], "content": None, **self._message}
        finish = "tool_calls" if "tool_calls" in message else "stop"
        if not asked.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            await _send(send, 200, {"id": "x", "choices": [choice]})
            return
        for index, call in enumerate(message.get("tool_calls", ())):
            call["index"] = index
        parts = [{"index": 0, "delta": message}, {"index": 0, "delta": {}, "finish_reason": finish}]
        chunks = [json.dumps({"id": "x", "choices": [part]}) for part in parts]
        await _send(send, 200, "".join(f"data: {one}\n\n" for one in [*chunks, "[DONE]"]))


async def _send(send: Any, status: int, body: Any) -> None:
    stream = isinstance(body, str)
    kind = b"text/event-stream" if stream else b"application/json"
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    data = body.encode() if stream else json.dumps(body).encode()
    await send({"type": "http.response.body", "body": data})


CLIENTS: dict[str, Ask] = {
    "chat": by_chat,
    "responses": by_responses,
    "messages": by_messages,
    "google": by_google,
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("dialect", CLIENTS)
@pytest.mark.parametrize("name", PROVIDERS)
def test_six_turns_are_asked_as_the_provider_wants_them(
    stage: Any, raw_engine: Any, start_proxy: Any, name: str, dialect: str, stream: bool
) -> None:
    provider = Provider(raw_engine, name)
    other = OtherModel((raw_engine.base_url,), "theirs", None, external=True)
    bench = start_proxy(stage.engine.base_url, other_models={"ext": other})
    assert CLIENTS[dialect](ToolLoop(bench.url, stream, model="ext")) == f"Step {TURNS - 1}."
    # A rule may be learned from one refusal, which the client does not see.
    assert len(provider.refused) <= 1, provider.refused
    calls = bench.calls()
    assert [call.status for call in calls] == [CallStatus.COMPLETE] * TURNS
    assert [call.parent_call_id for call in calls] == [None, *(call.id for call in calls[:-1])]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize(
    ("name", "field"), [("openrouter", "reasoning_details"), ("gemini", "thought_signature")]
)
def test_a_replayed_reply_keeps_opaque_fields_streamed_or_not(
    stage: Any, raw_engine: Any, start_proxy: Any, name: str, field: str, stream: bool
) -> None:
    """The client streams where the recorded one did not, and the other way round."""
    Provider(raw_engine, name)
    other = OtherModel((raw_engine.base_url,), "theirs", None, external=True)
    bench = start_proxy(stage.engine.base_url, other_models={"ext": other})
    by_chat(ToolLoop(f"{bench.url}/s/first", stream, model="ext"))
    recorded, asked = bench.calls(), len(raw_engine.bodies)
    origin = {"session": recorded[0].session_id, "call": recorded[1].id}
    again = httpx.post(f"{bench.url}/bridle/v1/sessions", json={"origin": origin}, timeout=60)
    body = json.loads(bench.reader.request_body(recorded[0].id)) | {"stream": not stream}
    url = f"{bench.url}/s/{again.json()['id']}/v1/chat/completions"
    reply = httpx.post(url, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert len(raw_engine.bodies) == asked
    (call,) = bench.reader.calls(again.json()["id"])
    for expected in (field, call.replies[0].tool_calls[0].id):
        assert f'"{expected}"' in reply.text


def test_doctor_shows_what_a_running_proxy_learned(
    stage: Any, raw_engine: Any, start_proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Provider(raw_engine, "gpt-5")
    other = OtherModel((raw_engine.base_url,), "theirs", None, external=True)
    bench = start_proxy(stage.engine.base_url, other_models={"ext": other})
    url = raw_engine.base_url
    assert examine_upstreams(bench.url)["lines"] == [f"ext at {url}: nothing learned yet"]  # type: ignore[index]
    by_responses(ToolLoop(bench.url, model="ext"))
    Provider(raw_engine, "deepseek")
    by_responses(ToolLoop(bench.url, stream=True, model="ext"))
    learned = "limit of a reply: max_completion_tokens; gets back: reasoning_content"
    shown = CliRunner().invoke(
        app, ["doctor", "--proxy", bench.url, "--store", str(bench.store_path)]
    )
    assert f"ext at {url}: {learned}" in shown.output
    assert examine_upstreams("http://127.0.0.1:9") is None
