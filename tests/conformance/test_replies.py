"""Replies: ids, logprobs, text and usage tell the same story, streamed or not."""

from __future__ import annotations

from typing import Any

import pytest


def text_of(api: Any, asked: str) -> str:
    return str(api.replies[asked][1][0])


def test_the_engine_is_healthy_and_names_its_model(api: Any) -> None:
    assert api.http.get("/health").status_code == 200
    card = api.http.get("/v1/models").json()["data"][0]
    assert card["max_model_len"] == 1024
    assert card["root"]


def test_a_reply_carries_its_prompt_ids_its_sampled_ids_and_a_logprob_for_each(api: Any) -> None:
    reply = api.chat("text")
    choice = reply["choices"][0]
    assert choice["message"]["content"] == text_of(api, "text")
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])
    assert reply["object"] == "chat.completion"
    assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])


def test_token_ids_keep_the_stop_token_and_the_text_does_not(api: Any) -> None:
    choice = api.chat("text")["choices"][0]
    assert choice["token_ids"] == api.tokenize(text_of(api, "text") + "<|im_end|>")


def test_ids_and_logprobs_are_given_only_when_asked_for(api: Any) -> None:
    reply = api.chat("text", return_token_ids=None, logprobs=None)
    assert not reply.get("prompt_token_ids")
    assert not reply["choices"][0].get("token_ids")
    assert not reply["choices"][0].get("logprobs")
    for chunk in api.stream("text", return_token_ids=None, logprobs=None):
        assert "prompt_token_ids" not in chunk or chunk["prompt_token_ids"] is None
        assert not chunk["choices"][0].get("token_ids")


def test_tokenize_gives_the_ids_that_a_chat_uses(api: Any) -> None:
    for asked in ("text", "call"):
        body = api.ask(asked)
        shown = {key: body[key] for key in ("model", "messages", "tools") if key in body}
        tokenized = api.post("/tokenize", **shown).json()
        assert tokenized["tokens"] == api.chat(asked)["prompt_token_ids"]
        assert tokenized["count"] == len(tokenized["tokens"])
        assert tokenized["max_model_len"] == 1024


def test_a_final_message_is_continued_when_asked(api: Any) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "text"}]
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    ids = api.chat("text", messages=messages, **going_on)["prompt_token_ids"]
    said = api.tokenize("text")
    assert ids[-len(said) :] == said
    counted = api.post("/tokenize", model=api.model, messages=messages, **going_on).json()
    assert counted["tokens"] == ids
    both = api.ask("text", messages=messages, **(going_on | {"add_generation_prompt": True}))
    assert "Cannot set both" in api.error("/v1/chat/completions", **both)["message"]


@pytest.mark.parametrize("asked", ["text", "count", "unicode", "call", "calls"])
def test_the_stream_folds_to_the_unstreamed_reply(api: Any, asked: str) -> None:
    chunks = api.stream(asked)
    fold = api.fold(chunks)
    whole = api.chat(asked)["choices"][0]
    assert fold.content == (whole["message"]["content"] or "")
    assert fold.token_ids == whole["token_ids"]
    assert fold.finish_reason == whole["finish_reason"]
    assert [call["name"] for call in fold.calls] == [
        call["function"]["name"] for call in whole["message"].get("tool_calls") or ()
    ]
    expected = [entry["logprob"] for entry in whole["logprobs"]["content"]]
    assert fold.logprobs == pytest.approx(expected, abs=1e-4)


def test_the_first_chunk_is_the_role_chunk_and_carries_the_prompt_ids(api: Any) -> None:
    chunks = api.fine_stream("text")
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[0]["prompt_token_ids"] == api.chat("text")["prompt_token_ids"]
    assert not chunks[0]["choices"][0].get("token_ids")
    assert len(chunks) > 5
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_usage_comes_in_a_last_chunk_without_choices(api: Any) -> None:
    chunks = api.stream("text", stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == len(api.fold(chunks).token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert all(chunk["choices"] for chunk in api.stream("text"))


def test_no_chunk_cuts_a_character_in_two(api: Any) -> None:
    chunks = api.fine_stream("unicode")
    assert api.fold(chunks).content == text_of(api, "unicode")
    assert not any("\ufffd" in str(chunk["choices"][0]["delta"]) for chunk in chunks)


def test_given_prompt_ids_are_used_verbatim_and_echoed(api: Any) -> None:
    ids = api.chat("text")["prompt_token_ids"]
    given = {"kv_transfer_params": {"prompt_token_ids": ids}}
    reply = api.chat("unicode", **given)
    assert reply["prompt_token_ids"] == ids
    assert reply["usage"]["prompt_tokens"] == len(ids)
    assert api.stream("unicode", **given)[0]["prompt_token_ids"] == ids


@pytest.mark.policy
def test_given_prompt_ids_condition_the_reply_and_the_messages_do_not(api: Any) -> None:
    ids = api.chat("text")["prompt_token_ids"]
    reply = api.chat("unicode", kv_transfer_params={"prompt_token_ids": ids})
    assert reply["choices"][0]["message"]["content"] == text_of(api, "text")


def test_given_prompt_ids_still_have_their_tool_calls_parsed(api: Any) -> None:
    ids = api.chat("call")["prompt_token_ids"]
    reply = api.chat("call", kv_transfer_params={"prompt_token_ids": ids})
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "lookup"


def test_reasoning_is_split_off_or_left_in_the_text(api: Any) -> None:
    message = api.chat("think")["choices"][0]["message"]
    raw = text_of(api, "think")
    if message.get("reasoning"):
        assert message["reasoning"].strip() == "An easy one."
        assert (message["content"] or "").strip() == "Done."
    else:
        assert message["content"] == raw


def test_the_request_id_is_part_of_the_reply_id(api: Any) -> None:
    headers = {"X-Request-Id": "abc-123"}
    reply = api.http.post("/v1/chat/completions", json=api.ask("text"), headers=headers).json()
    assert reply["id"] == "chatcmpl-abc-123"


def test_unknown_fields_are_ignored(api: Any) -> None:
    reply = api.chat("text", metadata={"a": 1}, service_tier="auto", surprise=[1, 2], user="me")
    assert reply["choices"][0]["message"]["content"] == text_of(api, "text")


def test_template_arguments_reach_the_template(api: Any) -> None:
    plain = api.chat("text")["prompt_token_ids"]
    extra = api.chat("text", chat_template_kwargs={"enable_thinking": False})["prompt_token_ids"]
    assert plain == extra, "this template does not know the argument, and must not fail on it"


def test_parts_of_text_are_joined(api: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "text"}]}]
    assert (
        api.chat("text", messages=parts)["prompt_token_ids"]
        == (api.chat("text")["prompt_token_ids"])
    )


def test_an_engine_serves_on_after_a_client_has_left(api: Any) -> None:
    body = api.ask("count", stream=True)
    for _ in range(4):
        with api.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            next(reply.iter_lines())
    assert api.chat("text")["choices"][0]["finish_reason"] == "stop"
