"""The set that a token is drawn from, where logits are equal, as they often are in bfloat16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.embedded.truncation import Truncation
from bridle.trainer.policy.drawn import Drawn

logits = st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=12)
"""Few values, so that ties are frequent."""


def truncation(top_p=1.0, top_k=0, min_p=0.0):
    return torch.tensor([[1.0, top_p, float(top_k), min_p]], dtype=torch.float64)


def kept(scores, **fields):
    found = Truncation.of(truncation(**fields)).kept(torch.tensor([scores]))
    return found[0].tolist()


def scored(scores, targets, **fields):
    """Return the logits of what ``targets`` were drawn from, and each one's row of them."""
    rows = torch.zeros(len(targets), dtype=torch.int64)
    drawn = Drawn(truncation(**fields).expand(len(targets), -1), rows, rows[:0])
    return drawn.apply(torch.tensor([scores]), rows, targets)


@given(logits, st.integers(1, 14))
def test_top_k_keeps_every_token_that_is_as_likely_as_the_kth(scores, k):
    least = sorted(scores, reverse=True)[min(k, len(scores)) - 1]
    assert kept(scores, top_k=k) == [score >= least for score in scores]


def by_hand(scores, top_p, top_k):
    """The number of tokens in the set, found one at a time, and the lowest score in it."""
    ordered = sorted(scores, reverse=True)
    if top_k:
        ordered = [s for s in ordered if s >= ordered[min(top_k, len(ordered)) - 1]]
    weights = torch.tensor(ordered, dtype=torch.float64).softmax(0).tolist()
    number, mass = 0, 0.0
    while number < len(ordered) and (number == 0 or mass < top_p - 1e-12):
        mass += weights[number]
        number += 1
    return number, ordered[number - 1]


# None of them is a share of up to twelve equal tokens, which rounding could put on either side.
@given(logits, st.sampled_from([0.31, 0.55, 0.81, 0.95]), st.sampled_from([0, 2, 5]))
def test_top_p_keeps_as_many_of_equal_tokens_as_it_needs_whichever_of_them_was_drawn(
    scores, top_p, top_k
):
    number, lowest = by_hand(scores, top_p, top_k)
    assert sum(kept(scores, top_p=top_p, top_k=top_k)) == number
    drawn = [token for token, score in enumerate(scores) if score >= lowest]
    targets = torch.tensor(drawn)
    found, places = scored(scores, targets, top_p=top_p, top_k=top_k)
    total = torch.tensor(sorted(scores, reverse=True)[:number]).logsumexp(0)
    logprobs = found.log_softmax(-1)[places, targets]
    for token, logprob in zip(drawn, logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(scores[token] - total.item(), abs=1e-5)


def test_a_token_that_rounding_puts_outside_of_the_set_is_scored_within_it():
    targets = torch.tensor([2])
    found, places = scored([3.0, 2.0, 1.0], targets, top_k=2)
    assert found[places, targets].isfinite().all()
