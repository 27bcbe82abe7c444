"""Sampling fields: they do what they say, and logprobs are of what was drawn from."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.policy
def test_the_same_seed_gives_the_same_reply(api: Any) -> None:
    def flips(seed: int) -> list[str]:
        reply = api.chat("flip", temperature=1.0, n=8, seed=seed)
        return [choice["message"]["content"] for choice in reply["choices"]]

    assert flips(3) == flips(3)
    assert len({tuple(flips(seed)) for seed in range(6)}) > 1


@pytest.mark.policy
def test_sampling_follows_the_distribution_at_temperature_one(api: Any) -> None:
    reply = api.chat("flip", temperature=1.0, n=40, seed=11)
    said = [choice["message"]["content"] for choice in reply["choices"]]
    assert 8 <= said.count("heads") <= 32
    assert said.count("heads") + said.count("tails") >= 36


@pytest.mark.policy
@pytest.mark.parametrize(
    "narrow", [{"top_k": 1}, {"top_p": 1e-4}, {"min_p": 1.0}, {"temperature": 0.0}]
)
def test_narrow_sampling_is_greedy(api: Any, narrow: dict[str, Any]) -> None:
    greedy = api.chat("flip")["choices"][0]["token_ids"]
    for seed in range(6):
        body = {"temperature": 1.0, "seed": seed, **narrow}
        assert api.chat("flip", **body)["choices"][0]["token_ids"] == greedy


@pytest.mark.policy
def test_greedy_takes_the_likeliest_token(api: Any) -> None:
    for entry in api.chat("text", top_logprobs=3)["choices"][0]["logprobs"]["content"]:
        top = entry["top_logprobs"]
        assert len(top) >= 3
        assert entry["logprob"] == max(each["logprob"] for each in top)
        assert entry["token"] == top[0]["token"]


@pytest.mark.policy
def test_logprobs_are_of_what_was_drawn_from(api: Any) -> None:
    def first(**fields: Any) -> tuple[float, list[float]]:
        body = {"temperature": 1.0, "seed": 5, "max_tokens": 1, "top_logprobs": 3, **fields}
        entry = api.chat("flip", **body)["choices"][0]["logprobs"]["content"][0]
        return entry["logprob"], [each["logprob"] for each in entry["top_logprobs"]]

    _, plain = first()
    for temperature in (0.5, 2.0):
        _, found = first(temperature=temperature)
        assert found[0] - found[1] == pytest.approx((plain[0] - plain[1]) / temperature, abs=0.01)
    for one in ({"top_k": 1}, {"top_p": 1e-4}, {"min_p": 1.0}):
        assert first(**one)[0] == pytest.approx(0.0, abs=1e-6)


def test_max_tokens_ends_a_reply_with_length(api: Any) -> None:
    for limit in ({"max_tokens": 5}, {"max_tokens": None, "max_completion_tokens": 5}):
        choice = api.chat("count", **limit)["choices"][0]
        assert choice["finish_reason"] == "length"
        assert len(choice["token_ids"]) == 5
        assert api.replies["count"][1][0].startswith(choice["message"]["content"])


def test_choices_are_numbered_and_counted(api: Any) -> None:
    reply = api.chat("text", temperature=1.0, n=3, seed=1)
    assert sorted(choice["index"] for choice in reply["choices"]) == [0, 1, 2]
    sampled = sum(len(choice["token_ids"]) for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] == sampled
    assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])


def test_streamed_choices_are_each_complete(api: Any) -> None:
    body = {"temperature": 1.0, "n": 3, "seed": 1, "stream_options": {"include_usage": True}}
    chunks = api.stream("text", **body)
    folds = [api.fold(chunks, index) for index in range(3)]
    assert all(fold.finish_reason == "stop" for fold in folds)
    assert all(fold.content for fold in folds)
    sampled = sum(len(fold.token_ids) for fold in folds)
    assert chunks[-1]["usage"]["completion_tokens"] == sampled


@pytest.mark.parametrize("stop", [" forty two", ["never said", "ty tw"], "."])
def test_a_stop_string_ends_the_text_before_it_and_keeps_what_was_sampled(
    api: Any, stop: Any
) -> None:
    full = api.replies["text"][1][0]
    found = next(each for each in ([stop] if isinstance(stop, str) else stop) if each in full)
    whole = api.chat("text", stop=stop)["choices"][0]
    fold = api.fold(api.stream("text", stop=stop))
    assert whole["message"]["content"] == fold.content == full[: full.index(found)]
    assert whole["finish_reason"] == fold.finish_reason == "stop"
    assert whole["stop_reason"] == fold.stop_reason == found
    full_ids = api.chat("text")["choices"][0]["token_ids"]
    assert whole["token_ids"] == full_ids[: len(whole["token_ids"])]
    assert fold.token_ids == whole["token_ids"]
    assert len(whole["logprobs"]["content"]) == len(whole["token_ids"])


def test_no_streamed_text_has_to_be_taken_back_for_a_stop_string(api: Any) -> None:
    content = ""
    for chunk in api.stream("text", stop=["forty two, and much else"]):
        content += chunk["choices"][0]["delta"].get("content") or ""
        assert api.replies["text"][1][0].startswith(content)
    assert content == api.replies["text"][1][0]


def test_stop_token_ids_end_a_reply_and_are_kept(api: Any) -> None:
    ids = api.chat("text")["choices"][0]["token_ids"]
    choice = api.chat("text", stop_token_ids=[ids[4]])["choices"][0]
    assert choice["token_ids"] == ids[: ids.index(ids[4]) + 1]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ids[4]


@pytest.mark.policy
def test_a_prompt_that_was_just_computed_is_not_computed_again(api: Any) -> None:
    first = api.chat("count", max_tokens=40)
    ids = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    details = api.chat("count", kv_transfer_params={"prompt_token_ids": ids})["usage"].get(
        "prompt_tokens_details"
    )
    if not details:
        pytest.skip("this engine does not report cached tokens")
    assert details["cached_tokens"] >= len(ids) - 32
