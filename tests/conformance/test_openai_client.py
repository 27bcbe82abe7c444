"""The official OpenAI client finds nothing to complain about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest


@pytest.fixture
def client(api: Any) -> Iterator[openai.OpenAI]:
    http = httpx.Client(trust_env=False)
    with openai.OpenAI(
        base_url=f"{api.base_url}/v1", api_key="none", http_client=http, max_retries=0
    ) as client:
        yield client


def test_a_whole_reply_is_understood(api: Any, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=api.model, messages=[{"role": "user", "content": "text"}], temperature=0
    )
    assert reply.choices[0].message.content == api.replies["text"][1][0]
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_stream_with_tool_calls_is_accumulated(api: Any, client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=api.model,
        messages=[{"role": "user", "content": "call"}],
        tools=api.tools,
        temperature=0,
        stream_options={"include_usage": True},
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    assert call.function.name == "lookup"
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage is not None
    assert final.usage.completion_tokens > 5


def test_logprobs_are_typed(api: Any, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=api.model,
        messages=[{"role": "user", "content": "text"}],
        temperature=0,
        logprobs=True,
        top_logprobs=1,
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert all(entry.logprob <= 0 and entry.bytes is not None for entry in logprobs.content)


def test_a_text_completion_is_understood(api: Any, client: openai.OpenAI) -> None:
    reply = client.completions.create(model=api.model, prompt="line 1;", max_tokens=4)
    assert len(reply.choices) == 1
    assert reply.usage is not None


def test_refusals_raise_the_clients_own_errors(api: Any, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=api.model, messages=[{"role": "user", "content": "text " * 3000}]
        )
    assert "maximum context length" in str(refused.value)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(
            model="another", messages=[{"role": "user", "content": "text"}]
        )


async def test_the_async_client_streams(api: Any) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{api.base_url}/v1", api_key="none", max_retries=0
    ) as client:
        stream = await client.chat.completions.create(
            model=api.model,
            messages=[{"role": "user", "content": "text"}],
            temperature=0,
            stream=True,
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == api.replies["text"][1][0]
