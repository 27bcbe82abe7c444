"""Groups of siblings: the choice of their branch, and the credit of their tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.support.episodes import one_branch

from bridle.recipes.learning.branched import BranchCase, BranchSettings, until_goal
from bridle.reconstruct.samples.sample import Episode
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.collection.branching import (
    BranchPoint,
    EndedSession,
    Where,
    chosen,
    in_order,
    is_branch,
)
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
    [("random", "abc"), ("failed", "abc"), ("entropy", "c"), ("value", "ab")],
)
def test_the_branch_is_chosen(where: Where, expected: str) -> None:
    points = [
        BranchPoint("a", 0.0, chance=0.5, calls=4),
        BranchPoint("b", 0.0, chance=0.9, calls=1),
        BranchPoint("c", 3.0, chance=1.0, calls=1),
    ]
    rng = np.random.default_rng(0)
    drawn = Counter(found.call_id for _ in range(60) if (found := chosen(points, where, rng)))
    assert set(drawn) == set(expected)
    assert chosen([], where, rng) is None


def test_the_chance_moves_from_the_groups_mean_to_the_sessions_own_result() -> None:
    failed, passed = EndedSession("f", False, 0.25), EndedSession("p", True, 0.25)
    assert [failed.chance(passed=at, calls=5) for at in (0, 4)] == pytest.approx([0.25, 0.05])
    assert [passed.chance(passed=at, calls=5) for at in (0, 4)] == pytest.approx([0.25, 0.85])
    points = [BranchPoint("", 0.0, failed.chance(at, 5), 5 - at) for at in range(1, 5)]
    assert points[0].worth == pytest.approx(0.2 * 0.8 / 4)


def test_sessions_whose_group_had_different_results_are_tried_first_for_their_value() -> None:
    sessions = [
        EndedSession("none", False, 0.0),
        EndedSession("all", True, 1.0),
        EndedSession("failed", False, 0.5),
        EndedSession("passed", True, 0.5),
    ]

    def firsts(where: Where) -> set[str]:
        return {in_order(sessions, where, np.random.default_rng(n))[0].id for n in range(40)}

    assert firsts("value") == {"failed", "passed"}
    assert firsts("failed") == {"none", "failed"}
    assert firsts("random") == firsts("entropy") == {"none", "all", "failed", "passed"}
    assert len(in_order(sessions, "value", np.random.default_rng(0))) == 4


def test_the_tokens_of_groups_of_siblings_are_counted_until_the_goal() -> None:
    settings = BranchSettings(farthest=2, goal=0.6, group_size=8, most=200)
    for case in (
        BranchCase("grpo"),
        BranchCase("siblings", "siblings", 0.5),
        BranchCase("value", "siblings", 0.75, "value"),
    ):
        figures = until_goal(case, settings, 0)
        assert figures is not None
        assert figures.tokens > figures.sessions > figures.steps > 0
        again = until_goal(case, settings, 0)
        assert again is not None
        assert again.tokens == figures.tokens, "a seed decides a run"
    assert until_goal(BranchCase("grpo"), replace(settings, most=1), 0) is None
