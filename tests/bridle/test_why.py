"""``bridle why``: the turn that lost a session, by its re-entries."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from bridle.diagnosis.why import NotMeasured, Tried, Value, explain, loss_interval
from bridle.reconstruct.evaluation import wilson


def chances(
    before: float, after: float, fatal: int, seed: int
) -> Callable[[int, int], list[Tried]]:
    """Return re-entries whose chance falls from ``before`` to ``after`` at the turn ``fatal``."""
    drawn = random.Random(seed)

    def enter(after_turn: int, count: int) -> list[Tried]:
        chance = before if after_turn < fatal else after
        return [Tried("ses", float(drawn.random() < chance)) for _ in range(count)]

    return enter


def test_intervals_are_those_of_the_literature() -> None:
    """Brown, Cai and DasGupta (2001) have 0 of 10; Newcombe (1998) has 56 of 70 and 48 of 80."""
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert wilson(0, 0) == (0.0, 1.0)
    newcombe = loss_interval(Value(56, 70), Value(48, 80))
    assert newcombe == pytest.approx((0.0524, 0.3339), abs=1e-3)


def test_planted_turns_are_found_and_healthy_sessions_are_not_accused() -> None:
    right, spent, sessions = 0, [], 400
    for seed in range(sessions):
        drawn = random.Random(seed)
        turns = drawn.randint(5, 30)
        fatal = drawn.randint(1, turns)
        found = explain(turns, False, chances(0.9, 0.1, fatal, seed))
        right += found.lost is not None and found.lost.turn == fatal
        spent.append(found.spent)
        assert max(map(len, found.tried.values())) <= 8
    print(f"found {right} of {sessions}; {sum(spent) / sessions:.1f} re-entries a session")
    assert right >= 0.9 * sessions
    for seed in range(200):
        turns = random.Random(seed).randint(5, 30)
        chance = random.Random(seed).uniform(0.5, 1.0)
        assert explain(turns, True, chances(chance, chance, 1, seed), budget=40).lost is None


def test_hopeless_sessions_are_not_accused() -> None:
    accused = [explain(12, False, chances(0.05, 0.05, 1, seed)).lost for seed in range(200)]
    assert sum(one is not None for one in accused) <= 4


def test_a_budget_bounds_the_search_and_its_rest_goes_where_least_is_known() -> None:
    found = explain(10, False, chances(1.0, 0.0, 4, 1), budget=80)
    assert found.spent == 80
    assert set(found.values) == set(range(11))
    small = explain(10, False, chances(1.0, 0.0, 4, 1), budget=10)
    assert small.spent == 10
    assert small.lost is None


def test_re_entries_without_a_reward_do_not_count() -> None:
    def half(_turn: int, count: int) -> Sequence[Tried]:
        return [Tried(None, None, "gone"), *(Tried("ses", 1.0) for _ in range(count - 1))]

    assert explain(3, True, half, budget=8).values[0].samples == 6
    with pytest.raises(NotMeasured, match="after turn 0 ended with a result: gone"):
        explain(3, False, lambda _turn, count: [Tried(None, None, "gone")] * count)
