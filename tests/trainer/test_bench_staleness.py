"""``bridle bench staleness``: the runs lag as told, and the trust region acts when they do."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from bridle.bench.staleness import (
    GOOD,
    StalenessRun,
    StalenessSettings,
    _policies,
    _sessions,
    losses_of,
    run_with_lag,
)
from bridle.cli.program import app
from bridle.trainer.config import LossConfig

SMALL = StalenessSettings(steps=3, groups=4, group_size=4, warmth=0.0, hidden=32)


def test_sessions_are_three_turns_of_the_sampler_that_are_rewarded_by_right_answers() -> None:
    _, sampler = _policies(0, SMALL)
    episodes = _sessions(sampler, 2, 5, SMALL, np.random.default_rng(0))
    assert len(episodes) == 16
    assert len({each.session.group_id for each in episodes}) == 4
    for each in episodes:
        (sample,) = each.samples
        assert each.conservation.trained == sample.mask.sum() == 9
        assert set(sample.versions[sample.mask]) == {2}
        assert (sample.logprobs[sample.mask] < 0).all()
        symbol = sample.token_ids[1::5] - 5
        answered = sample.token_ids.reshape(3, 5)[:, 2:]
        right = [(1, 5 + (s * 5 + 3) % 8, 2) for s in symbol.tolist()]
        hits = [tuple(a) == r for a, r in zip(answered.tolist(), right, strict=True)]
        assert each.rewards[0].value == pytest.approx(sum(hits) / 3)


@pytest.mark.sampled(0)
def test_on_policy_nothing_is_outside_and_a_lag_widens_the_distance() -> None:
    settings = StalenessSettings(steps=6, groups=4, rate=5e-3, warmth=0.2, hidden=64)
    on_policy = run_with_lag(LossConfig(), 0, 0, settings)
    plain = run_with_lag(LossConfig(trust_region="none"), 0, 0, settings)
    assert on_policy.outside == 0
    assert on_policy.rewards == plain.rewards
    late = run_with_lag(LossConfig(), 4, 0, settings)
    assert late.outside > 0
    assert late.effective < on_policy.effective


def test_a_run_has_collapsed_when_its_last_third_is_not_good() -> None:
    for rewards, collapsed in (
        ([0.9] * 50 + [GOOD - 0.1] * 25, True),
        ([0.1] * 50 + [GOOD] * 25, False),
    ):
        run = StalenessRun("clip", "truncate", 4, 0, rewards, 0.0, 1.0, mean_lag=4.0, time=1.0)
        assert run.as_data()["collapsed"] is collapsed
    assert len(losses_of(["none", "clip"], ["truncate", "mask"])) == 4


@pytest.mark.sampled(0)
def test_sessions_that_take_time_are_sampled_over_versions_and_take_less_of_it() -> None:
    over_time = replace(SMALL, steps=8, warmth=0.3, hidden=64, by_sessions=True)
    in_turn = run_with_lag(LossConfig(), 0, 0, over_time)
    ahead = run_with_lag(LossConfig(), 2, 0, over_time)
    assert in_turn.mean_lag == 0
    assert 0 < ahead.mean_lag <= 2
    assert ahead.time < in_turn.time
    assert len(ahead.rewards) == 8


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_default_keeps_what_it_learns_at_a_lag_at_which_no_region_loses_it() -> None:
    settings = StalenessSettings()
    for seed in range(3):
        assert run_with_lag(LossConfig(), 4, seed, settings).final >= GOOD
    without = [
        run_with_lag(LossConfig(trust_region="none"), 4, seed, settings).final for seed in (1, 3)
    ]
    assert max(without) < GOOD


@pytest.mark.long
def test_the_command_prints_each_run_as_json() -> None:
    arguments = ["bench", "staleness", "--seeds", "1", "--steps", "3", "--lag", "1", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    runs = json.loads(done.stdout)
    assert [run["trust_region"] for run in runs] == ["clip", "none"]
    assert all(len(run["rewards"]) == 3 for run in runs)
