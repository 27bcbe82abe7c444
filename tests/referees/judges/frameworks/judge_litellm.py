"""LiteLLM as the client of each dialect."""

from __future__ import annotations

from typing import Any

import litellm
import pytest
from asked import ANSWER, CHAT_TOOLS, EXACTLY, MODEL, OSLO, QUESTION, TURNS, City

PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": "", "gemini": "/v1beta"}
HI = [{"role": "user", "content": QUESTION}]


@pytest.fixture(params=PROVIDERS)
def asked(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    where = {"api_base": url + PROVIDERS[request.param], "api_key": "k", "num_retries": 0}
    # LiteLLM gives a model that it does not know more tokens than the engine's context holds.
    return {"model": f"{request.param}/{MODEL}", "messages": list(HI), "max_tokens": 999, **where}


def whole(asked: dict[str, Any], streamed: bool) -> Any:
    if not streamed:
        return litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    return litellm.stream_chunk_builder(chunks, messages=asked["messages"])


@pytest.mark.parametrize("streamed", [False, True])
def test_text(asked: dict[str, Any], streamed: bool) -> None:
    reply = whole(asked, streamed)
    assert reply.choices[0].message.content.strip() == ANSWER
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_tools(asked: dict[str, Any], streamed: bool) -> None:
    asked["tools"] = CHAT_TOOLS
    for _ in range(TURNS):
        message = whole(asked, streamed).choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["weather", "time"]
        asked["messages"].append(message.model_dump(exclude_none=True))
        asked["messages"] += [
            {"role": "tool", "tool_call_id": call.id, "content": call.function.arguments}
            for call in message.tool_calls
        ]
        asked["messages"].append({"role": "user", "content": "And again?"})


def test_object(asked: dict[str, Any]) -> None:
    # Clients without a key that say the same are taken for one, which changes its words.
    said = f"You speak through {asked['model']}. {EXACTLY}"
    asked["messages"] = [{"role": "user", "content": said}]
    reply = litellm.completion(**asked, response_format=City)
    assert City.model_validate_json(reply.choices[0].message.content) == OSLO


def test_error(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**asked, top_p=7)


@pytest.mark.parametrize("streamed", [False, True])
def test_responses(url: str, streamed: bool) -> None:
    where: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "k", "num_retries": 0}
    reply: Any = litellm.responses(
        model=f"openai/{MODEL}", input=QUESTION, stream=streamed, **where
    )
    if streamed:
        reply = list(reply)[-1].response
    assert reply.output[-1].content[0].text.strip() == ANSWER


async def test_messages(url: str) -> None:
    where: dict[str, Any] = {"api_base": url, "api_key": "k"}
    reply: Any = await litellm.anthropic_messages(
        model=f"anthropic/{MODEL}", messages=HI, max_tokens=99, **where
    )
    assert reply["content"][-1]["text"].strip() == ANSWER
