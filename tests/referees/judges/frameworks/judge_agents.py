"""Agent frameworks: Pydantic AI, the OpenAI Agents SDK and smolagents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from agents import Agent as OpenAIAgent
from agents import (
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import ANSWER, MODEL, QUESTION, TURNS, City
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as ResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.google import GoogleProvider
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import OpenAIServerModel, Tool, ToolCallingAgent

set_tracing_disabled(True)


def _openai(url: str) -> OpenAIProvider:
    return OpenAIProvider(base_url=f"{url}/v1", api_key="k")


MODELS: dict[str, Callable[[str], Any]] = {
    "chat": lambda url: OpenAIChatModel(MODEL, provider=_openai(url)),
    "responses": lambda url: ResponsesModel(MODEL, provider=_openai(url)),
    "anthropic": lambda url: AnthropicModel(
        MODEL, provider=AnthropicProvider(base_url=url, api_key="k")
    ),
    "google": lambda url: GoogleModel(MODEL, provider=GoogleProvider(base_url=url, api_key="k")),
}


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Sunny in {city}."


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dialect", MODELS)
async def test_pydantic_ai(dialect: str, streamed: bool, url: str) -> None:
    agent = Agent(MODELS[dialect](url), tools=[weather], retries=0)
    history: Any = []
    for _ in range(TURNS):
        if streamed:
            async with agent.run_stream(QUESTION, message_history=history) as run:
                said, history = await run.get_output(), run.all_messages()
        else:
            ran = await agent.run(QUESTION, message_history=history)
            said, history = ran.output, ran.all_messages()
        assert said.strip() == ANSWER


@pytest.mark.parametrize("dialect", MODELS)
async def test_pydantic_ai_output(dialect: str, url: str) -> None:
    agent = Agent(MODELS[dialect](url), output_type=City, retries=0)
    assert (await agent.run(QUESTION)).output == City(name="Paris", people=3)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("made", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def test_openai_agents(made: Any, streamed: bool, url: str) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    agent = OpenAIAgent(name="helper", model=made(MODEL, client), tools=[function_tool(weather)])
    items: Any = []
    for _ in range(TURNS):
        items.append({"role": "user", "content": QUESTION})
        if streamed:
            ran: Any = Runner.run_streamed(agent, items)
            assert [event async for event in ran.stream_events()]
        else:
            ran = await Runner.run(agent, items)
        assert ran.final_output.strip() == ANSWER
        items = ran.to_input_list()


class Weather(Tool):  # type: ignore[misc]
    """The same tool for smolagents."""

    name = "weather"
    description = "Return the weather of a city."
    inputs = {"city": {"type": "string", "description": "The city."}}  # noqa: RUF012
    output_type = "string"

    def forward(self, city: str) -> str:
        return weather(city)


def test_smolagents(url: str) -> None:
    model = OpenAIServerModel(MODEL, api_base=f"{url}/v1", api_key="k")
    agent = ToolCallingAgent([Weather()], model, verbosity_level=0)
    assert str(agent.run(QUESTION)).strip() == ANSWER
