"""Groups of siblings: the choice of their branch, and the credit of their tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.support.episodes import one_branch

from bridle.recipes.learning.branched import BranchCase, BranchSettings, tokens_to_goal
from bridle.reconstruct.samples.sample import Episode
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.collection.branching import BranchPoint, Where, chosen, is_branch
from bridle.trainer.config import AdvantageConfig
from bridle.trainer.credit import CreditGroup, estimated


def session(name: str, reward: float, calls: int = 3, origin: str | None = None) -> Episode:
    given = Reward(name, "reward", reward, 0.0, source=RewardSource.VERIFIER)
    made = one_branch(name, [((number,), None) for number in range(calls)], [given])
    return replace(made, session=replace(made.session, origin_call_id=origin))


def credit(name: str, own: Sequence[Episode], batch: Sequence[Episode]) -> list[list[float]]:
    rewards = np.asarray([one.rewards[0].value for one in own])
    group = CreditGroup(own, rewards, AdvantageConfig(name), batch=batch)
    return [part[0][own[0].samples[0].mask].tolist() for part in estimated(group)]


def test_siblings_are_compared_with_the_others_of_their_branch_point() -> None:
    group = [session(name, value, 1) for name, value in (("a", 1), ("b", 0), ("c", 0))]
    found = credit("siblings", group, group)
    deviation = 3**-0.5
    assert np.ravel(found) == pytest.approx([1 / deviation, *[-0.5 / deviation] * 2], abs=1e-4)
    assert credit("siblings", group[:1], group) == [[0.0]]


def test_turn_values_are_the_change_of_the_value_over_the_steps_up_to_the_next_one() -> None:
    """Siblings from the second step of ``a`` nearly always fail: its first step was bad."""
    group = [session("a", 1), session("b", 1), session("c", 1)]
    siblings = [session(f"s{number}", 0, 1, origin="a1") for number in range(3)]
    found = credit("turn_values", group, [*group, *siblings])
    assert found == [[-0.75, 0.75, 0.75], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    alone = credit("turn_values", siblings[:2], [*group, *siblings])
    assert alone == [[0.0], [0.0]]


def test_a_share_of_the_groups_is_siblings() -> None:
    assert [number for number in range(8) if is_branch(number, 0.5)] == [1, 3, 5, 7]
    assert sum(is_branch(number, 0.3) for number in range(100)) == 30
    assert not any(is_branch(number, 0.0) for number in range(10))
    assert all(is_branch(number, 1.0) for number in range(10))


@pytest.mark.parametrize(
    ("where", "expected"),
    [("random", "abc"), ("failed", "ac"), ("entropy", "c"), ("value", "a")],
)
def test_the_branch_is_chosen(where: Where, expected: str) -> None:
    points = [
        BranchPoint("s", "a", 0.0, success=False, successes=1, siblings=2),
        BranchPoint("s", "b", 0.0, success=True, successes=30, siblings=40),
        BranchPoint("s", "c", 3.0, success=False, successes=0, siblings=20),
    ]
    rng = np.random.default_rng(0)
    drawn = Counter(found.call_id for _ in range(60) if (found := chosen(points, where, rng)))
    assert set(drawn) == set(expected)
    assert chosen([], where, rng) is None


def test_the_tokens_of_groups_of_siblings_are_counted_until_the_goal() -> None:
    settings = BranchSettings(farthest=2, goal=0.6, window=1, group_size=8, most=200)
    for case in (BranchCase("grpo"), BranchCase("siblings", "siblings", 0.5)):
        tokens = tokens_to_goal(case, settings, 0)
        assert tokens is not None
        assert tokens > 0
        assert tokens_to_goal(case, settings, 0) == tokens, "a seed decides a run"
    assert tokens_to_goal(BranchCase("grpo"), replace(settings, most=1), 0) is None
