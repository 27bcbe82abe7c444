"""Text completions: prompts as text, as ids, and lists of either; scoring."""

from __future__ import annotations

from typing import Any

import pytest


def complete(api: Any, prompt: Any, **extra: Any) -> dict[str, Any]:
    body = {"model": api.model, "prompt": prompt, "temperature": 0.0, "max_tokens": 6, **extra}
    reply = api.post("/v1/completions", **body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_text_and_ids_are_the_same_prompt(api: Any) -> None:
    text = "line 1; line 2;"
    from_text = complete(api, text, return_token_ids=True)["choices"][0]
    from_ids = complete(api, api.tokenize(text), return_token_ids=True)["choices"][0]
    assert from_text["token_ids"] == from_ids["token_ids"]
    assert from_text["prompt_token_ids"] == from_ids["prompt_token_ids"] == api.tokenize(text)
    assert from_text["text"] == from_ids["text"]
    assert from_text["finish_reason"] == from_ids["finish_reason"]


def test_each_prompt_of_a_list_has_its_choices(api: Any) -> None:
    prompts = ["line 1;", "The answer"]
    reply = complete(api, prompts, return_token_ids=True)
    alone = [complete(api, prompt, return_token_ids=True)["choices"][0] for prompt in prompts]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert [choice["token_ids"] for choice in reply["choices"]] == [
        choice["token_ids"] for choice in alone
    ]
    as_ids = complete(api, [api.tokenize(prompt) for prompt in prompts], return_token_ids=True)
    assert [choice["token_ids"] for choice in as_ids["choices"]] == [
        choice["token_ids"] for choice in alone
    ]
    assert reply["usage"]["prompt_tokens"] == sum(len(api.tokenize(each)) for each in prompts)


def test_logprobs_are_given_per_token(api: Any) -> None:
    choice = complete(api, "line 1;", logprobs=2, return_token_ids=True)["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(choice["token_ids"]) == len(logprobs["tokens"])
    assert len(logprobs["top_logprobs"]) == len(choice["token_ids"])
    assert logprobs["text_offset"][0] == 0


def test_a_streamed_completion_folds_to_the_whole_one(api: Any) -> None:
    body = {
        "model": api.model,
        "prompt": ["line 1;", "The answer"],
        "temperature": 0.0,
        "max_tokens": 6,
        "return_token_ids": True,
        "logprobs": 0,
    }
    chunks = api.events(
        "/v1/completions", **body, stream=True, stream_options={"include_usage": True}
    )
    whole = api.post("/v1/completions", **body).json()
    for index in range(2):
        choices = [
            choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index
        ]
        expected = whole["choices"][index]
        assert "".join(choice["text"] for choice in choices) == expected["text"]
        assert [i for choice in choices for i in choice["token_ids"]] == expected["token_ids"]
        assert choices[0]["prompt_token_ids"] == expected["prompt_token_ids"]
        assert choices[-1]["finish_reason"] == expected["finish_reason"]
        found = [value for each in choices for value in each["logprobs"]["token_logprobs"]]
        assert found == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-4)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_prompt_logprobs_score_every_id_but_the_first(api: Any) -> None:
    ids = api.tokenize("line 1; line 2; line 3;")
    entries = complete(api, ids, max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert len(entries) == len(ids)
    assert entries[0] is None
    for token_id, entry in zip(ids[1:], entries[1:], strict=True):
        assert entry[str(token_id)]["logprob"] <= 0.0


@pytest.mark.policy
def test_scoring_twice_gives_the_same_logprobs(api: Any) -> None:
    ids = api.tokenize("The answer is forty two")

    def score() -> list[float]:
        entries = complete(api, ids, max_tokens=1, prompt_logprobs=0)["choices"][0]
        return [
            entry[str(token_id)]["logprob"]
            for token_id, entry in zip(ids[1:], entries["prompt_logprobs"][1:], strict=True)
        ]

    assert score() == pytest.approx(score(), abs=1e-5)
    assert min(score()) < -0.01


def test_tokens_of_logprobs_are_named_by_their_ids_if_asked(api: Any) -> None:
    asked = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    (chunk, *_) = complete(api, "line 1;", logprobs=1, **asked)["choices"]
    names = [f"token_id:{token}" for token in chunk["token_ids"]]
    assert chunk["logprobs"]["tokens"] == names
    whole = api.chat("text", top_logprobs=1, **asked)["choices"]
    streamed = [one for chunk in api.stream("text", **asked) for one in chunk["choices"]]
    for choices in (whole, streamed):
        entries = [e for one in choices for e in (one["logprobs"] or {}).get("content") or ()]
        ids = [token for one in choices for token in one.get("token_ids") or ()]
        assert ids
        assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in ids]
