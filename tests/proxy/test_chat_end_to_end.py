"""An official OpenAI client, the proxy, an engine and the store."""

from __future__ import annotations

from typing import Any

import openai

from store.records import CallStatus


def client(bench: Any, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{bench.url}/v1", api_key="anything", max_retries=0, **options)


ASK: Any = {"model": "gpt-x", "messages": [{"role": "user", "content": "two and two?"}]}


def test_a_whole_reply_is_answered_and_recorded_with_the_engines_ids(
    bench: Any, stage: Any
) -> None:
    reply = client(bench).chat.completions.create(**ASK)

    assert reply.choices[0].message.content == "The answer is four."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == "gpt-x"
    call = bench.call()
    assert call.status is CallStatus.COMPLETE, call.reason
    (sampled,) = bench.reader.sampled(call.id)
    tokenizer = stage.engine.backend.tokenizer
    assert tokenizer.decode(list(sampled.token_ids)).startswith("The answer is four.")
    prompt = bench.reader.prompt_token_ids(call.id)
    assert prompt is not None
    assert list(prompt) == list(stage.requests[0].prompt_ids)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(sampled.token_ids) == len(sampled.logprobs)
    assert reply.usage.prompt_tokens == len(prompt)


def test_a_stream_is_answered_and_recorded_with_the_engines_ids(bench: Any, stage: Any) -> None:
    stream = client(bench).chat.completions.create(
        **ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "The answer is four."
    assert chunks[-1].usage is not None
    call = bench.call()
    assert call.status is CallStatus.COMPLETE, call.reason
    assert call.sampled_tokens == chunks[-1].usage.completion_tokens
    assert call.message["content"] == "The answer is four."
