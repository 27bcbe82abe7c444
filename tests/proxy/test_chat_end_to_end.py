"""An official OpenAI client, the proxy, an engine and the store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import openai

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.store.records import CallStatus


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
    assert call.replies[0].content == "The answer is four."


def test_new_text_in_parts_is_rendered_as_the_template_shows_parts(
    model_dir: Path, tmp_path: Path, start_proxy: Any
) -> None:
    """Templates that go through a content's parts (Qwen 3.5, GLM, Gemma) are given them by vLLM."""
    shows = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    directory = tmp_path / "parts"
    shutil.copytree(model_dir, directory)
    (directory / "chat_template.jinja").write_text(shows)
    with ScriptedEngine(directory, lambda _: ScriptedReply("four.")) as engine:
        bench = start_proxy(engine.base_url, tokenizer_dir=directory)
        ask = client(bench).chat.completions
        said = ask.create(**ASK).choices[0].message
        new = [{"type": "text", "text": text} for text in ("And three", " and three?")]
        messages = [*ASK["messages"], said, {"role": "user", "content": new}]
        ask.create(model="gpt-x", messages=messages)
        first, second = engine.requests

    sampled = bench.reader.sampled(bench.calls()[0].id)[0].token_ids
    assert list(second.prompt_ids)[: len(first.prompt_ids)] == list(first.prompt_ids)
    assert second.prompt_text == (
        f"{first.prompt_text}{first.tokenizer.decode(sampled)}\n"
        "<|im_start|>user\nAnd three and three?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert bench.calls()[1].break_reason is None
