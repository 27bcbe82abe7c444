"""Trust regions against their definitions, and what a step reports of its distance from μ."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import UsageError
from bridle.run.training import require_parts
from bridle.trainer.config import GrpoConfig, LossConfig
from bridle.trainer.learner.update import UpdateStats
from bridle.trainer.losses.drift import Drift
from bridle.trainer.losses.losses import LossSums, clipped_surrogate, policy_loss
from bridle.trainer.losses.terms import TokenTerms
from bridle.trainer.losses.trust import outside_trust

NONE = LossConfig(trust_region="none")
ratios = st.floats(0.05, 8.0)
tokens = st.lists(st.tuples(ratios, st.floats(-3, 3), st.integers(0, 3)), min_size=1, max_size=12)


def stale_terms(rows):
    """Tokens with π = π_old, as in the only update of a step, and π/μ, advantage and branch."""
    ratio, advantages, branches = zip(*rows, strict=True)
    size = len(rows)
    logprobs = torch.full((size,), -2.0, dtype=torch.float64, requires_grad=True)
    return TokenTerms(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        behaviour_logprobs=logprobs.detach() - torch.tensor(ratio, dtype=torch.float64).log(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.full((size,), 1 / size, dtype=torch.float64),
        branches=torch.tensor(branches),
    )


def gradient(terms, config):
    loss, sums = policy_loss(terms, config)
    loss.backward()
    return terms.logprobs.grad, sums


@given(tokens)
def test_with_one_update_a_step_the_default_has_the_gradient_of_ppo_clipped_at_the_sampler(rows):
    config = LossConfig(importance_cap=100.0)
    found, _ = gradient(stale_terms(rows), config)
    terms = stale_terms(rows)
    ratio = (terms.logprobs - terms.behaviour_logprobs).exp()
    bounds = config.trust_low, config.trust_high
    (terms.weights * clipped_surrogate(ratio, terms.advantages, *bounds)).sum().backward()
    torch.testing.assert_close(found, terms.logprobs.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "outside"),
    [
        (1.0, 1.0, False),
        (1.5, 1.0, True),  # a good token that is likelier already
        (1.5, -1.0, False),  # a bad token that became likelier: pushed down
        (0.5, -1.0, True),  # a bad token that is rarer already
        (0.5, 1.0, False),  # a good token that became rarer: pulled up
        (9.0, 0.0, False),
    ],
)
def test_the_clip_leaves_out_what_has_moved_far_enough_already(ratio, advantage, outside):
    slope, sums = gradient(stale_terms([(ratio, advantage, 0)]), LossConfig())
    assert sums["outside"] == outside
    assert (slope.item() == 0.0) == (outside or advantage == 0.0)
    assert sums["importance"] == pytest.approx(0.0 if outside else min(ratio, 2.0))


@given(tokens)
def test_off_policy_masking_leaves_out_the_bad_tokens_of_branches_that_became_rarer(rows):
    config = LossConfig(trust_region="off_policy", trust_nats=0.3)
    expected = []
    for _, advantage, branch in rows:
        gaps = [-math.log(ratio) for ratio, _, of in rows if of == branch]
        expected.append(advantage < 0 and math.fsum(gaps) / len(gaps) > 0.3)
    assert outside_trust(stale_terms(rows), config).tolist() == expected


@given(tokens, st.sampled_from(["clip", "off_policy"]))
def test_on_policy_no_token_is_outside_and_the_gradient_is_unchanged(rows, region):
    rows = [(1.0, advantage, branch) for _, advantage, branch in rows]
    plain, _ = gradient(stale_terms(rows), NONE)
    found, sums = gradient(stale_terms(rows), LossConfig(trust_region=region))
    assert sums["outside"] == 0
    assert torch.equal(found, plain)


@given(tokens, st.sampled_from(["clip", "off_policy"]))
def test_how_branches_are_dealt_to_packs_changes_neither_gradient_nor_sums(rows, region):
    config = LossConfig(trust_region=region, importance="sequence")
    rows = sorted(rows, key=lambda row: row[2])
    whole, sums = gradient(stale_terms(rows), config)
    parts = []
    packed = LossSums()
    for branch in sorted({row[2] for row in rows}):
        own = stale_terms([row for row in rows if row[2] == branch])
        own = replace(own, weights=torch.full_like(own.weights, 1 / len(rows)))
        slope, part = gradient(own, config)
        parts.append(slope)
        packed += part
    torch.testing.assert_close(torch.cat(parts), whole)
    assert packed == pytest.approx(dict(sums))


def test_a_region_and_a_correction_may_be_a_file_of_the_users(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def second(terms, config):\n    return terms.branches == 1\n"
        "def half(terms, config):\n    return terms.old_logprobs.clone().fill_(0.5)\n"
    )
    config = LossConfig(trust_region=f"{file}:second", importance=f"{file}:half")
    require_parts(GrpoConfig(loss=config, sinks=()))
    slope, sums = gradient(stale_terms([(1.0, 1.0, 0), (1.0, 1.0, 1)]), config)
    assert slope.tolist() == [-0.25, 0.0]
    assert sums["outside"] == 1
    for loss in (LossConfig(trust_region="nowhere"), LossConfig(importance="nothing")):
        with pytest.raises(UsageError, match=r"FILE\.py:NAME"):
            require_parts(GrpoConfig(loss=loss, sinks=()))


drifts = st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 4)), min_size=1, max_size=60)


def drift_of(rows):
    log_ratios, lags = zip(*rows, strict=True)
    found = torch.tensor(log_ratios, dtype=torch.float64)
    return Drift.of(found, torch.zeros_like(found), torch.tensor(lags))


@given(drifts, st.integers(0, 60))
def test_the_drift_of_packs_adds_up_to_that_of_the_step(rows, cut):
    parts = [drift_of(part) for part in (rows[:cut], rows[cut:]) if part]
    found = sum(parts, Drift()).metrics()
    assert found == pytest.approx(drift_of(rows).metrics())
    log_ratios = np.asarray([row[0] for row in rows])
    assert found["importance/min"] == pytest.approx(np.exp(log_ratios.min()))
    for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        exact = np.quantile(log_ratios, share, method="inverted_cdf")
        assert math.log(found[f"importance/{name}"]) == pytest.approx(exact, abs=0.0051)
    by_lag = {lag: [math.expm1(x) - x for x, at in rows if at == lag] for _, lag in rows}
    for lag, estimates in by_lag.items():
        assert found[f"kl/sampler/lag_{lag}"] == pytest.approx(np.mean(estimates), abs=1e-12)
    assert ("kl/engine" in found) == (0 in by_lag)


def test_a_step_that_trained_no_token_has_no_drift() -> None:
    assert UpdateStats().drift.metrics() == {}
    assert drift_of([(math.nan, 0), (-math.inf, 1)]).metrics() == {}
    assert drift_of([(math.nan, 0), (0.1, 1)]).tokens == {1: 1}
