"""Test the requests that an engine refuses, and the words of its refusals."""

from __future__ import annotations

from typing import Any

import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": 3.0}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must be in (0, 1]"),
        ({"top_k": -5}, "top_k must be"),
        ({"min_p": 2.0}, "min_p must be in [0, 1]"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 2}, "n must be 1 when using greedy sampling"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 5000}, "max_tokens=5000 cannot be greater than max_model_len=1024"),
        ({"stop": [""]}, "stop cannot contain an empty string"),
        ({"tools": []}, "`tools` must not be an empty array"),
        ({"tool_choice": "auto"}, "When using `tool_choice`, `tools` must be set"),
        ({"top_logprobs": 2, "logprobs": False}, "when using `top_logprobs`"),
        ({"top_logprobs": 50}, "greater than max allowed"),
        ({"stream_options": {"include_usage": True}}, "Stream options can only be defined"),
        ({"kv_transfer_params": {"prompt_token_ids": [9_999_999]}}, "out of vocabulary"),
    ],
)
def test_a_bad_field_is_refused_with_400_in_vllms_words(
    api: Any, extra: dict[str, Any], words: str
) -> None:
    error = api.error(CHAT, **api.ask("text", **extra))
    assert error["code"] == 400
    assert words in error["message"]


def test_a_prompt_longer_than_the_context_is_refused_in_vllms_words(api: Any) -> None:
    long = [{"role": "user", "content": "forty two " * 1500}]
    for stream in (False, True):
        error = api.error(CHAT, **api.ask("text", messages=long, stream=stream))
        assert error["code"] == 400
        assert "This model's maximum context length is 1024 tokens." in error["message"]
        assert error["param"] in ("input_tokens", "input_text")
    error = api.error(COMPLETIONS, model=api.model, prompt=[5] * 1100, max_tokens=4)
    assert "contains 1100 input tokens" in error["message"]


def test_a_reply_is_clamped_to_what_is_left_of_the_context(api: Any) -> None:
    ids = [5] * 1020
    reply = api.post(COMPLETIONS, model=api.model, prompt=ids, max_tokens=100, ignore_eos=True)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] <= 4


def test_an_unknown_model_is_not_found(api: Any) -> None:
    error = api.error(CHAT, **api.ask("text", model="another"))
    assert error["code"] == 404
    assert "The model `another` does not exist" in error["message"]


def test_an_unknown_tool_choice_is_refused(api: Any) -> None:
    named = {"type": "function", "function": {"name": "elsewhere"}}
    error = api.error(CHAT, **api.ask("call", tool_choice=named))
    assert error["code"] == 400
    assert "does not match any of the specified `tools`" in error["message"]
    assert api.error(CHAT, **api.ask("call", tool_choice="perhaps"))["code"] == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": "hello"}),
        (CHAT, {}),
        (CHAT, {"messages": [{"content": "no role"}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}),
        (COMPLETIONS, {"prompt": {"a": 1}}),
    ],
)
def test_a_body_of_the_wrong_shape_is_refused_with_400(
    api: Any, path: str, body: dict[str, Any]
) -> None:
    assert api.error(path, model=api.model, **body)["code"] == 400


def test_a_body_that_is_not_json_is_refused_with_400(api: Any) -> None:
    headers = {"content-type": "application/json"}
    reply = api.http.post(CHAT, content=b'{"messages": [', headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == 400
