"""Six turns with thinking and tools through upstreams that enforce eight providers' rules.

The official client of each dialect asks them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from typer.testing import CliRunner

from bridle.cli.program import app
from bridle.proxy.settings import OtherModel
from bridle.run.deployment import examine_upstreams
from bridle.store.records import CallStatus

TURNS = 6
PARAMETERS = {"type": "object", "properties": {"step": {"type": "integer"}}, "required": ["step"]}
TOOL = {"name": "look_up", "description": "Look a step up.", "parameters": PARAMETERS}

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


def by_chat(url: str, stream: bool) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "go"}]
    given: Any = {"model": "ext", "tools": [{"type": "function", "function": TOOL}]}
    given |= {"max_completion_tokens": 99}
    while True:
        if stream:
            with client.chat.completions.stream(**given, messages=messages) as events:
                said = events.get_final_completion().choices[0].message
        else:
            said = client.chat.completions.create(**given, messages=messages).choices[0].message
        if not said.tool_calls:
            return str(said.content)
        (call,) = said.tool_calls
        made = {"name": call.function.name, "arguments": call.function.arguments}
        kept = {"id": call.id, "type": "function", "function": made}
        messages.append({"role": "assistant", "content": said.content, "tool_calls": [kept]})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})


def by_responses(url: str, stream: bool) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    given: Any = {"model": "ext", "tools": [{"type": "function", **TOOL}], "max_output_tokens": 99}
    items: list[Any] = [{"role": "user", "content": "go"}]
    while True:
        if stream:
            *_, last = client.responses.create(**given, input=items, stream=True)
            said = last.response
        else:
            said = client.responses.create(**given, input=items)
        items += [item.model_dump(exclude_none=True) for item in said.output]
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return str(said.output_text)
        items.append(
            {"type": "function_call_output", "call_id": calls[0].call_id, "output": "done"}
        )


def by_messages(url: str, stream: bool) -> str:
    client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
    tool = {"name": "look_up", "description": "Look a step up.", "input_schema": PARAMETERS}
    given: Any = {"model": "ext", "max_tokens": 99, "tools": [tool]}
    messages: list[Any] = [{"role": "user", "content": "go"}]
    while True:
        if stream:
            with client.messages.stream(**given, messages=messages) as events:
                said = events.get_final_message()
        else:
            said = client.messages.create(**given, messages=messages)
        messages.append({"role": "assistant", "content": said.content})
        calls = [block for block in said.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in said.content if block.type == "text")
        result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": "done"}
        messages.append({"role": "user", "content": [result]})


def by_google(url: str, stream: bool) -> str:
    client = genai.Client(api_key="x", http_options={"base_url": url})
    types = genai.types
    declared = types.FunctionDeclaration(
        name="look_up", description="Look a step up.", parameters_json_schema=PARAMETERS
    )
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[declared])], max_output_tokens=99
    )
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="go")])]
    while True:
        asked: Any = {"model": "ext", "contents": contents, "config": config}
        chunks: list[Any] = []
        if stream:
            chunks += client.models.generate_content_stream(**asked)
        else:
            chunks.append(client.models.generate_content(**asked))
        parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts or ()]
        contents.append(types.Content(role="model", parts=parts))
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            return "".join(part.text or "" for part in parts if not part.thought)
        reply = types.FunctionResponse(id=calls[0].id, name="look_up", response={"output": "done"})
        contents.append(types.Content(role="user", parts=[types.Part(function_response=reply)]))


CLIENTS = {"chat": by_chat, "responses": by_responses, "messages": by_messages, "google": by_google}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("dialect", CLIENTS)
@pytest.mark.parametrize("name", PROVIDERS)
def test_six_turns_are_asked_as_the_provider_wants_them(
    stage: Any, raw_engine: Any, start_proxy: Any, name: str, dialect: str, stream: bool
) -> None:
    provider = Provider(raw_engine, name)
    other = OtherModel((raw_engine.base_url,), "theirs", None, external=True)
    bench = start_proxy(stage.engine.base_url, other_models={"ext": other})
    assert CLIENTS[dialect](bench.url, stream) == f"Step {TURNS - 1}."
    # A rule may be learned from one refusal, which the client does not see.
    assert len(provider.refused) <= 1, provider.refused
    calls = bench.calls()
    assert [call.status for call in calls] == [CallStatus.COMPLETE] * TURNS
    assert [call.parent_call_id for call in calls] == [None, *(call.id for call in calls[:-1])]


def test_doctor_shows_what_a_running_proxy_learned(
    stage: Any, raw_engine: Any, start_proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Provider(raw_engine, "gpt-5")
    other = OtherModel((raw_engine.base_url,), "theirs", None, external=True)
    bench = start_proxy(stage.engine.base_url, other_models={"ext": other})
    url = raw_engine.base_url
    assert examine_upstreams(bench.url)["lines"] == [f"ext at {url}: nothing learned yet"]  # type: ignore[index]
    by_responses(bench.url, stream=False)
    Provider(raw_engine, "deepseek")
    by_responses(bench.url, stream=True)
    learned = "limit of a reply: max_completion_tokens; gets back: reasoning_content"
    shown = CliRunner().invoke(
        app, ["doctor", "--proxy", bench.url, "--store", str(bench.store_path)]
    )
    assert f"ext at {url}: {learned}" in shown.output
    assert examine_upstreams("http://127.0.0.1:9") is None
