"""pass@k and mean@k with their intervals."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bridle.reconstruct.evaluation import (
    Attempt,
    evaluated,
    judged,
    over_tasks,
    pass_at_k,
    split_by,
)
from bridle.reconstruct.rewards import Aggregation
from bridle.store.reward import FindingMode, Reward, RewardKind, RewardSource


@pytest.mark.parametrize(("attempts", "passed"), [(4, 0), (4, 1), (5, 3), (4, 4)])
def test_pass_at_k_is_the_share_of_draws_with_a_success(attempts: int, passed: int) -> None:
    outcomes = [True] * passed + [False] * (attempts - passed)
    for k in range(1, attempts + 1):
        draws = list(itertools.combinations(outcomes, k))
        share = sum(map(any, draws)) / len(draws)
        assert pass_at_k(attempts, passed, k) == pytest.approx(share, abs=1e-12)


def test_figures_are_means_over_tasks_however_many_sessions_each_has() -> None:
    rewards = {"a": [1.0, 0.0], "b": [0.0, 0.0, 1.0, 0.0], "c": [1.0, 1.0]}
    attempts = [Attempt(task, value) for task, own in rewards.items() for value in own]
    found = evaluated(attempts, ks=(1, 2, 4))
    assert (found.tasks, found.attempts) == (3, 8)
    assert found.pass_at[1].value == pytest.approx((0.5 + 0.25 + 1) / 3)
    assert found.pass_at[2].value == pytest.approx((1 + 0.5 + 1) / 3)
    assert 4 not in found.pass_at, "two tasks have no four attempts"
    k, mean = found.mean_at
    assert (k, mean.value) == (2, pytest.approx((0.5 + 0 + 1) / 3))


def test_a_success_is_what_the_caller_says() -> None:
    attempts = [Attempt("a", 0.6), Attempt("b", 0.4)]
    assert evaluated(attempts).pass_at[1].value == 0
    assert evaluated(attempts, success=0.5).pass_at[1].value == 0.5


def test_intervals_hold_the_mean_and_narrow_with_the_tasks() -> None:
    few, many = over_tasks([1.0, 0.0] * 5), over_tasks([1.0, 0.0] * 50)
    assert few.low < many.low < 0.5 < many.high < few.high
    assert over_tasks([1.0] * 10).high == 1.0
    beyond = over_tasks([2.0, 4.0, 3.0])
    spread = 1.96 * math.sqrt(1.0 / 3)
    assert (beyond.low, beyond.high) == pytest.approx((3 - spread, 3 + spread))


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_the_order_of_the_tasks_changes_no_bit(scale: float) -> None:
    values = [scale * value for value in (0.1, 0.7, 1 / 3, 0.9)]
    found = {over_tasks(order) for order in itertools.permutations(values)}
    assert len(found) == 1


def test_attempts_are_told_apart_by_harness_task_and_version() -> None:
    attempts = [
        Attempt("a", 1.0, "pi", 10),
        Attempt("a", 0.0, "codex", 9),
        Attempt("b", 0.0, "pi", None),
    ]
    assert list(split_by(attempts, "harness")) == ["codex", "pi"]
    assert list(split_by(attempts, "version")) == ["–", "9", "10"]
    assert [len(own) for own in split_by(attempts, "task").values()] == [2, 1]


def test_nothing_cannot_be_evaluated() -> None:
    with pytest.raises(ValueError, match="no attempt"):
        evaluated([])


scores = st.lists(
    st.tuples(
        st.sampled_from(["reward", "tests", "a finding"]),
        st.sampled_from([-1.0, 0.0, 1.0]),
        st.sampled_from([RewardKind.SCORE, RewardKind.SUCCESS]),
        st.sampled_from([{}, {}, {"role": "planner"}, {"branch": "c"}, {"call_id": "c"}]),
    ),
    min_size=1,
    max_size=3,
)


@settings(deadline=None)
@given(
    st.lists(scores, min_size=1, max_size=5),
    st.sampled_from(FindingMode),
    st.sampled_from(["reward", "a finding"]),
    st.floats(-1e3, 1e3),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_a_finding_never_raises_a_pass_rate(sessions, mode, name, value, success) -> None:  # type: ignore[no-untyped-def]
    """The finding's mode makes no difference: also a quarantined session is an attempt."""
    rule, verifier = Aggregation(), RewardSource.VERIFIER
    own = [
        [Reward("s", n, v, 1.0, source=verifier, kind=kind, **at) for n, v, kind, at in given]
        for given in sessions
    ]
    finding = Reward("s", name, value, 2.0, None, None, verifier, RewardKind.FINDING, mode)

    def figures(rewards: list[list[Reward]], outcome: str) -> tuple[int, float, float]:
        outcomes = [outcome, *["completed"] * (len(rewards) - 1)]
        values = [judged(o, r, rule) for o, r in zip(outcomes, rewards, strict=True)]
        assume(any(values))
        own = [Attempt("t", one.reward, success=one.success) for one in values if one is not None]
        found = evaluated(own, success=success)
        return found.attempts, found.pass_at[1].value, found.mean_at[1].value

    before = figures(own, "completed")
    outcome = "quarantined" if mode is FindingMode.QUARANTINE else "completed"
    after = figures([[*own[0], finding], *own[1:]], outcome)
    assert after[0] == before[0]
    assert after[1] <= before[1]
    assert after[2] <= before[2]
    if mode is FindingMode.WARN:
        assert after == before


def test_a_success_decides_whether_an_attempt_has_passed_and_counts_in_nothing_else() -> None:
    verifier = RewardSource.VERIFIER
    score = Reward("s", "reward", 0.25, 1.0, source=verifier)
    passed = Reward("s", "solved", 1.0, 1.0, source=verifier, kind=RewardKind.SUCCESS)
    claimed = replace(passed, value=0.0, created_at=2.0, source=RewardSource.OPERATOR)
    zero = Reward("s", "x", 1.0, 2.0, None, None, verifier, RewardKind.FINDING, FindingMode.ZERO)
    rule = Aggregation()
    assert judged("completed", [score], rule) == (0.25, 0.25)
    assert judged("completed", [score, passed, claimed], rule) == (0.25, 1.0)
    assert judged("completed", [passed], rule) == (1.0, 1.0)
    assert judged("completed", [score, passed, zero], rule) == (0.0, 0.0)
    assert judged("quarantined", [score, passed], rule) == (0.0, 0.0)
    assert rule.numbers([score, passed]) == rule.numbers([score])
    plan = Reward("s", "plan", 0.5, 1.0, source=verifier, role="planner")
    assert judged("completed", [plan], rule) == (0.5, 0.5)
    assert judged("completed", [score, plan], rule) == (0.25, 0.25)
