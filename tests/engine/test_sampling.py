"""Test the way from logits to tokens: truncation, penalties, and the drawn distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bridle.engine.embedded.sampling import SamplingRow, sample
from bridle.engine.serve.backend import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
PROBABILITIES = LOGITS.softmax(-1)


def draws(count: int = 1500, tokens: tuple[int, ...] = (), **fields: Any) -> torch.Tensor:
    """Relative frequencies over a regular grid of uniform numbers."""
    sampling = SamplingParams(max_tokens=1, **fields)
    rows = [SamplingRow(sampling, (index + 0.5) / count, [0, *tokens], 1) for index in range(count)]
    ids = [token.id for token in sample(LOGITS.repeat(count, 1), rows)]
    return torch.bincount(torch.tensor(ids), minlength=6) / count


def test_draws_follow_the_softmax() -> None:
    torch.testing.assert_close(draws(), PROBABILITIES, atol=3e-3, rtol=0)


def test_temperature_scales_the_logits() -> None:
    expected = (LOGITS / 0.5).softmax(-1)
    torch.testing.assert_close(draws(temperature=0.5), expected, atol=3e-3, rtol=0)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_p": 0.6}, 2),
        ({"top_p": 0.5}, 1),
        ({"min_p": 0.2}, 3),
        ({"top_k": 3, "top_p": 0.999}, 3),
        ({"top_k": 100, "top_p": 1.0, "min_p": 0.0}, 6),
    ],
)
def test_truncation_keeps_the_likeliest_and_renormalises(fields: dict[str, Any], kept: int) -> None:
    expected = torch.zeros(6)
    expected[:kept] = PROBABILITIES[:kept] / PROBABILITIES[:kept].sum()
    torch.testing.assert_close(draws(**fields), expected, atol=3e-3, rtol=0)


def test_logprobs_are_those_of_what_was_drawn_from() -> None:
    sampling = SamplingParams(
        max_tokens=1, temperature=0.5, top_k=2, presence_penalty=0.5, top_logprobs=3
    )
    (token,) = sample(LOGITS[None], [SamplingRow(sampling, 0.2, [0, 0], 1)])
    expected = torch.tensor([(2.0 - 0.5) / 0.5, 1.0 / 0.5]).log_softmax(-1).tolist()
    assert token.logprob == pytest.approx(expected[token.id], abs=1e-6)
    assert [token_id for token_id, _ in token.top[:2]] == [0, 1]
    assert [value for _, value in token.top] == pytest.approx([*expected, -math.inf], abs=1e-6)


def test_logprobs_of_the_policys_own_distribution_are_those_of_its_logits() -> None:
    (token,) = sample(LOGITS[None], [SamplingRow(SamplingParams(max_tokens=1), 0.6, [], 0)])
    assert token.logprob == float(LOGITS.log_softmax(-1)[token.id])


def test_penalties_lower_what_was_sampled() -> None:
    once = draws(tokens=(1,), presence_penalty=2.0)
    twice = draws(tokens=(1, 1), frequency_penalty=1.0)
    expected = LOGITS.clone()
    expected[1] -= 2.0
    for found in (once, twice):
        torch.testing.assert_close(found, expected.softmax(-1), atol=3e-3, rtol=0)


def test_repetition_penalty_also_lowers_the_prompt() -> None:
    expected = LOGITS.clone()
    expected[0] /= 2.0
    expected[5] *= 2.0
    found = draws(tokens=(5,), repetition_penalty=2.0)
    torch.testing.assert_close(found, expected.softmax(-1), atol=3e-3, rtol=0)


def test_greedy_and_drawn_rows_share_a_batch() -> None:
    greedy = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0.0, [], 0)
    drawn = SamplingRow(SamplingParams(max_tokens=1), 0.9999, [], 0)
    tokens = sample(LOGITS.repeat(2, 1), [greedy, drawn])
    assert tokens[0].id == 0
    assert tokens[1].id == 5
    assert tokens[0].top == ()


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for uniform in (0.0, 0.4999999, 0.5, 0.9999999):
        row = SamplingRow(SamplingParams(max_tokens=1), uniform, [], 0)
        assert sample(logits, [row])[0].id in (1, 3)
