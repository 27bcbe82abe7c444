"""``bridle bench learning``: the task is sparse, and the trainer's own parts learn it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bridle.bench import learning_table
from bridle.bench.collect import CollectSettings
from bridle.recipes.learning.branched import BranchCase, tokens_to_goal
from bridle.recipes.learning.sparse import (
    PLACES,
    STEPS,
    WAYS,
    LearningSettings,
    _group,
    cases,
    compared,
    sessions_to_goal,
)
from bridle.trainer.config import OptimizerConfig

EASY = LearningSettings(farthest=2, groups=2, group_size=8, rate=0.3, most=40)


def test_the_default_learns_and_a_policy_that_is_not_trained_does_not() -> None:
    default = cases()[0]
    assert default.config.optimizer == OptimizerConfig()
    reached = sessions_to_goal(default, EASY, 0)
    assert reached is not None
    assert reached <= EASY.most * 16
    assert sessions_to_goal(default, replace(EASY, rate=0.0, farthest=8, most=6), 0) is None


def test_a_session_is_rewarded_when_it_comes_to_the_goal_which_ends_it() -> None:
    right = np.arange(PLACES) % WAYS
    two_roles = next(case for case in cases() if case.two_roles)
    rng = np.random.default_rng(0)
    far = replace(EASY, farthest=PLACES, group_size=32)
    knows = torch.full((PLACES, WAYS), -50.0)
    knows[torch.arange(PLACES), torch.from_numpy(right)] = 50.0
    group = _group("g", knows, 3, right, two_roles, far, rng)
    starts = [int(each.samples[0].token_ids[0]) for each in group]
    assert {0, PLACES - 1} <= set(starts)
    for each, start in zip(group, starts, strict=True):
        assert [reward.value for reward in each.rewards] == [1.0]
        assert [int(one.token_ids[0]) for one in each.samples] == [*range(start, PLACES)]
        assert sum(sample.weight for sample in each.samples) == pytest.approx(1.0)
        assert {int(sample.versions[1]) for sample in each.samples} == {3}
    longest = max(group, key=lambda each: len(each.samples))
    assert {sample.role for sample in longest.samples} == {"planner", "worker"}
    for each in _group("g", -knows, 3, right, two_roles, far, rng):
        assert [reward.value for reward in each.rewards] == [0.0]
        assert len(each.samples) == STEPS


NEEDED: dict[str, list[int | None]] = {
    "grpo": [100, 200, None],
    "gigpo": [100, 90, 400],
    "mean": [100, None, None],
}


def test_cases_are_compared_with_the_first_by_medians() -> None:
    assert [(each.name, each.sessions, each.ratio) for each in compared(NEEDED)] == [
        ("grpo", 200, 1.0),
        ("gigpo", 100, 0.5),
        ("mean", None, None),
    ]


def test_the_table_has_a_row_for_each_case_bound_and_refill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = CollectSettings(slots=4, group_size=2, groups_per_step=2, steps=4, median_s=0.01)
    monkeypatch.setattr(learning_table, "SLOW", small)
    bounds, refills = learning_table.measured()
    assert [each.max_staleness for each in bounds] == [0, 2]
    assert refills[0].live < refills[1].live
    text = learning_table.table(compared(NEEDED), bounds, refills, EASY)
    assert "| gigpo | 100 | 100, 90, 400 | 0.50 |" in text
    assert "| mean | not reached | 100, not reached, not reached |  |" in text
    assert f"| 8 | {refills[1].live:.2f} |" in text


def test_the_tokens_of_groups_of_siblings_are_counted_until_the_goal() -> None:
    settings = LearningSettings(farthest=2, goal=0.6, window=1, group_size=8, most=200)
    for case in (BranchCase("grpo"), BranchCase("siblings", "siblings", 0.5)):
        tokens = tokens_to_goal(case, settings, 0)
        assert tokens is not None
        assert tokens > 0
        assert tokens_to_goal(case, settings, 0) == tokens, "a seed decides a run"
    assert tokens_to_goal(BranchCase("grpo"), replace(settings, most=1), 0) is None
