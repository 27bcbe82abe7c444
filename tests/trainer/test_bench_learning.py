"""``bridle bench learning``: the task is sparse, and the trainer's own parts learn it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bridle.bench.learning import (
    SEEN,
    STEPS,
    WAYS,
    LearningSettings,
    _group,
    cases,
    compared,
    sessions_to_goal,
)
from bridle.trainer.config import OptimizerConfig

EASY = LearningSettings(far=3, groups=2, group_size=8, rate=0.3, most=40)


def test_the_default_learns_and_a_policy_that_is_not_trained_does_not() -> None:
    default = cases()[0]
    assert default.config.optimizer == OptimizerConfig()
    reached = sessions_to_goal(default, EASY, 0)
    assert reached is not None
    assert reached <= EASY.most * 16
    assert sessions_to_goal(default, replace(EASY, rate=0.0, far=6, most=6), 0) is None


def test_a_session_is_rewarded_at_its_end_for_the_places_that_it_came() -> None:
    right = np.arange(STEPS + 1) % WAYS
    knows = torch.full((SEEN, WAYS), -50.0)
    knows[torch.arange(SEEN), torch.from_numpy(right[np.arange(SEEN) % (STEPS + 1)])] = 50.0
    two_roles = next(case for case in cases() if case.two_roles)
    rng = np.random.default_rng(0)
    (first, *_) = _group("g", knows, 3, right, two_roles, replace(EASY, far=STEPS), rng)
    assert [reward.value for reward in first.rewards] == [1.0]
    assert [int(sample.token_ids[0]) for sample in first.samples] == [11 * t + t for t in range(10)]
    assert {sample.role for sample in first.samples} == {"planner", "worker"}
    assert sum(sample.weight for sample in first.samples) == pytest.approx(1.0)
    assert {int(sample.versions[1]) for sample in first.samples} == {3}


def test_cases_are_compared_with_the_first() -> None:
    found = compared({"grpo": 200.0, "gigpo": 100.0, "mean": None})
    assert [(each.name, each.ratio) for each in found] == [
        ("grpo", 1.0),
        ("gigpo", 0.5),
        ("mean", None),
    ]
