"""LangChain with the packages of three providers."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import pytest
from asked import ANSWER, EXACTLY, MODEL, OSLO, QUESTION, TURNS, City
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_google_genai import ChatGoogleGenerativeAI
from langchain_openai import ChatOpenAI

CHAT: dict[str, Any] = {"use_responses_api": False, "stream_usage": True}
PLAIN: dict[str, Any] = {"model": MODEL, "api_key": "k", "max_retries": 0}
MODELS: dict[str, Callable[[str], Any]] = {
    "chat": lambda url: ChatOpenAI(base_url=f"{url}/v1", **CHAT, **PLAIN),
    "responses": lambda url: ChatOpenAI(base_url=f"{url}/v1", use_responses_api=True, **PLAIN),
    "anthropic": lambda url: ChatAnthropic(base_url=url, max_tokens=999, **PLAIN),
    "google": lambda url: ChatGoogleGenerativeAI(base_url=url, **PLAIN | {"max_retries": 1}),
}


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Sunny in {city}."


@pytest.fixture(params=MODELS)
def made(request: pytest.FixtureRequest, url: str) -> Any:
    return MODELS[request.param](url)


def whole(model: Any, messages: Any, streamed: bool) -> Any:
    return reduce(add, model.stream(messages)) if streamed else model.invoke(messages)


@pytest.mark.parametrize("streamed", [False, True])
def test_text(made: Any, streamed: bool) -> None:
    reply = whole(made, QUESTION, streamed)
    assert reply.text.strip() == ANSWER
    assert reply.usage_metadata["output_tokens"]


@pytest.mark.parametrize("streamed", [False, True])
def test_tools(made: Any, streamed: bool) -> None:
    bound, messages = made.bind_tools([weather]), []
    for _ in range(TURNS):
        messages.append(HumanMessage(QUESTION))
        messages.append(whole(bound, messages, streamed))
        (call,) = messages[-1].tool_calls
        messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
        messages.append(whole(bound, messages, streamed))
        assert messages[-1].text.strip() == ANSWER


def test_object(made: Any) -> None:
    assert made.with_structured_output(City, method="json_schema").invoke(EXACTLY) == OSLO


def test_agent(made: Any) -> None:
    state: Any = {"messages": []}
    agent = create_agent(made, [weather])
    for turn in range(TURNS):
        state = agent.invoke({"messages": [*state["messages"], HumanMessage(QUESTION)]})
        assert state["messages"][-1].text.strip() == ANSWER
        assert len(state["messages"]) == 4 * (turn + 1)
