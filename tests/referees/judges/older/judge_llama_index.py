"""LlamaIndex: its client of OpenAI's chat, and an agent on it."""

from __future__ import annotations

from typing import Any

import pytest
from asked import ANSWER, EXACTLY, MODEL, OSLO, QUESTION, TURNS, City
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike


@pytest.fixture
def llm(url: str) -> Any:
    able = {"is_chat_model": True, "is_function_calling_model": True}
    return OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key="k", max_retries=0, **able)


def test_text(llm: Any) -> None:
    assert llm.complete(QUESTION).text.strip() == ANSWER
    *_, last = llm.stream_complete(QUESTION)
    assert last.text.strip() == ANSWER


def test_object(llm: Any) -> None:
    llm.should_use_structured_outputs = True
    called = llm.as_structured_llm(City).complete(EXACTLY)
    assert called.raw in (OSLO, City(name="Paris", people=3))


@pytest.mark.parametrize("streamed", [False, True])
async def test_agent(llm: Any, streamed: bool) -> None:
    called = []

    def weather(city: str) -> str:
        """Return the weather of a city."""
        called.append(city)
        return f"Sunny in {city}."

    agent = FunctionAgent(tools=[weather], llm=llm, streaming=streamed)
    context = Context(agent)
    for turn in range(TURNS):
        assert str(await agent.run(QUESTION, ctx=context)).strip() == ANSWER
        assert len(called) == turn + 1
