"""Anthropic's own SDK, which validates every reply and event strictly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool
from asked import HI, TURNS
from pydantic import BaseModel

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": name, "input_schema": SCHEMA} for name in ("weather", "time")]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


class City(BaseModel):
    name: str
    people: int


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=url, api_key="k", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def test_models(client: anthropic.Anthropic) -> None:
    for listed in client.models.list():
        assert client.models.retrieve(listed.id).lifecycle == "active"


def test_message(client: anthropic.Anthropic, model: str) -> None:
    reply = client.messages.create(model=model, max_tokens=999, messages=HI, thinking=THINKING)
    assert [block.type for block in reply.content] == ["thinking", "text"]
    assert reply.stop_reason == "end_turn"


def test_count(client: anthropic.Anthropic, model: str) -> None:
    counted = client.messages.count_tokens(model=model, messages=HI)
    reply = client.messages.create(model=model, max_tokens=999, messages=HI)
    cached = reply.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == reply.usage.input_tokens + cached


def test_stream(client: anthropic.Anthropic, model: str) -> None:
    with client.messages.stream(
        model=model, max_tokens=999, messages=HI, thinking=THINKING
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert "thinking" in events
    assert "text" in events
    assert final.usage.output_tokens_details is not None
    assert final.usage.output_tokens_details.thinking_tokens


def test_parsed(client: anthropic.Anthropic, model: str) -> None:
    said: Any = [{"role": "user", "content": 'Say exactly: {"name": "Oslo", "people": 700000}'}]
    reply = client.messages.parse(model=model, max_tokens=999, messages=said, output_format=City)
    assert reply.parsed_output == City(name="Oslo", people=700000)


@pytest.mark.parametrize("streamed", [False, True])
def test_tools(client: anthropic.Anthropic, model: str, streamed: bool) -> None:
    messages = list(HI)
    for _ in range(TURNS):
        asked: Any = {"model": model, "max_tokens": 999, "messages": messages, "tools": TOOLS}
        if streamed:
            with client.messages.stream(**asked, thinking=THINKING) as stream:
                reply: Any = stream.get_final_message()
        else:
            reply = client.messages.create(**asked, thinking=THINKING)
        assert reply.stop_reason == "tool_use"
        calls = [block for block in reply.content if block.type == "tool_use"]
        assert [call.name for call in calls] == ["weather", "time"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": call.input["city"]}
            for call in calls
        ]
        messages.append({"role": "assistant", "content": reply.content})
        messages.append(
            {"role": "user", "content": [*results, {"type": "text", "text": "And again?"}]}
        )


def test_tool_runner(client: anthropic.Anthropic, model: str) -> None:
    @beta_tool
    def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"Sunny in {city}."

    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=999, messages=HI, tools=[weather]
    )
    last = runner.until_done()
    assert [block.type for block in last.content] == ["thinking", "text"]


@pytest.mark.parametrize(
    "fields", [{"messages": []}, {"temperature": "hot"}, {"max_tokens": -1}, {"mcp_servers": [{}]}]
)
def test_errors(client: anthropic.Anthropic, model: str, fields: dict[str, Any]) -> None:
    body = {"model": model, "max_tokens": 9, "messages": HI} | fields
    extra = {name: body.pop(name) for name in ("mcp_servers", "temperature") if name in body}
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**body, extra_body=extra)


def test_unknown_model(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("no-such-model")
