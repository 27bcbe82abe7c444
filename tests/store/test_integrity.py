import math
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from bridle.store.records import (
    MISSING_LOGPROB,
    CallStatus,
    Choice,
    KeptTokens,
    VersionRun,
    logprob_array,
)
from bridle.store.writing.integrity import contradiction


@pytest.fixture
def ended(calls):
    return calls.ended(calls.begun("session_x"), [1, 2, 3], [4, 5, 6, 7])


def with_choice(ended, **fields):
    return replace(ended, choices=(structs.replace(ended.choices[0], **fields),))


def scores(*values):
    return np.array(values, dtype=np.float32)


def test_a_reply_that_agrees_with_itself_passes(ended):
    assert contradiction(ended) is None


def test_a_certain_token_may_have_a_logprob_just_above_zero(ended):
    assert contradiction(with_choice(ended, logprobs=scores(0, 5e-7, -1, -0.0))) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logprobs": scores(-1, -1, -1)}, "logprobs_mismatch"),
        ({"logprobs": scores(-1, -1, -1, MISSING_LOGPROB)}, "logprobs_missing"),
        ({"logprobs": scores(-1, -np.inf, -1, -1)}, "logprobs_not_finite"),
        ({"logprobs": scores(-1, 0.25, -1, -1)}, "logprobs_positive"),
        ({"versions": ()}, "version_missing"),
        ({"kept": KeptTokens.of([[4], [5]])}, "kept_mismatch"),
        ({"kept": KeptTokens.of([[4, 9], [], [8], []])}, "kept_without_token"),
        ({"routed_experts": np.zeros((3, 2, 2), np.uint8)}, "experts_mismatch"),
        ({"versions": (VersionRun(1, 3),)}, "version_missing"),
        ({"versions": (VersionRun(0, 3), VersionRun(4, 4))}, "version_runs_malformed"),
        ({"versions": (VersionRun(0, 3), VersionRun(0, 4))}, "version_runs_malformed"),
        ({"versions": (VersionRun(0, 3), VersionRun(2, 2))}, "version_went_back"),
        ({"token_ids": np.array([4, 5, 6], np.uint32), "logprobs": scores(-1, -1, -1)}, "usage"),
    ],
)
def test_each_contradiction_has_its_name(ended, fields, reason):
    assert contradiction(with_choice(ended, **fields)).startswith(reason)


def test_prompt_ids_must_be_as_many_as_usage_says(ended):
    usage = {"prompt_tokens": 4, "completion_tokens": 4}
    assert contradiction(replace(ended, usage=usage)).startswith("prompt_mismatch: 3 prompt ids")


def test_a_complete_call_without_usage_cannot_be_proved(ended):
    assert contradiction(replace(ended, usage={})) == "usage_missing"


def test_a_call_that_was_cut_is_not_held_to_its_usage(ended):
    assert contradiction(replace(ended, status=CallStatus.PARTIAL, usage={})) is None


def test_sampled_ids_need_their_prompt(ended):
    assert contradiction(replace(ended, prompt_token_ids=None)).startswith("prompt_ids_missing")


def test_a_call_without_any_ids_contradicts_nothing(ended):
    empty = Choice(np.empty(0, np.uint32), np.empty(0, np.float32), (), "stop")
    assert contradiction(replace(ended, prompt_token_ids=None, choices=(empty,))) is None


def test_usage_counts_all_choices(calls):
    ended = calls.ended(calls.begun("session_x"), [1], [2, 3], [4])
    assert contradiction(ended) is None
    assert contradiction(replace(ended, choices=ended.choices[:1])).startswith("usage_mismatch")


@pytest.mark.parametrize("values", [(-1, np.nan, -1, -1), (np.nan,) * 4])
def test_a_token_without_a_logprob_contradicts_nothing(ended, values):
    assert contradiction(with_choice(ended, logprobs=scores(*values))) is None


def test_whatever_stands_for_no_logprob_is_recorded_as_nan():
    given = [-1.0, MISSING_LOGPROB, -20_000.0, math.inf, -math.inf, math.nan, 0.0]
    assert np.isnan(logprob_array(given)).tolist() == [False, *[True] * 5, False]


def test_a_reply_to_an_empty_prompt_is_a_contradiction(ended):
    empty = replace(ended, prompt_token_ids=np.empty(0, np.uint32))
    assert contradiction(empty).startswith("prompt_empty")


def test_ids_are_those_of_the_vocabulary(ended):
    assert contradiction(ended, 8) is None
    assert contradiction(ended, 7) == "id_beyond_vocabulary: 7 of 7 ids (choice 0)"
    prompt = replace(ended, prompt_token_ids=np.array([1, 9, 3], np.uint32))
    assert contradiction(prompt, 8) == "id_beyond_vocabulary: 9 of 8 ids (prompt)"
    assert contradiction(prompt) is None
