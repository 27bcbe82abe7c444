"""Test the figures by which a collapse shows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bridle.reconstruct.samples.sample import Episode
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import GrpoConfig
from support.episodes import one_branch


def session(name: str, value: float, calls: Sequence[Sequence[int]], *more: Reward) -> Episode:
    given = [Reward(name, "reward", value, 1.0, source=RewardSource.VERIFIER), *more]
    return one_branch(name, [(ids, None) for ids in calls], given, "completed")


def figures(*episodes: Episode) -> dict[str, float]:
    return dict(prepare(episodes, 0, GrpoConfig()).signal)


def judged(name: str, value: float, spread: float) -> Reward:
    detail = {"judges": {"a": value}, "spread": spread}
    return Reward(name, "rubric", value, 2.0, source=RewardSource.SCORER, detail=detail)


def test_calls_lengths_and_their_relation_to_the_reward_are_measured() -> None:
    found = figures(session("a", 1.0, [[1], [1], [1]]), session("b", 0.0, [[1]]))
    assert found["signal/calls"] == 2.0
    assert found["signal/length_reward"] == pytest.approx(1.0)
    assert found["signal/group_std"] == 0.5
    assert found["signal/top_group"] == 1.0
    assert "judge/score" not in found


def test_a_judge_s_score_is_measured_beside_the_verifier_s() -> None:
    found = figures(
        session("a", 1.0, [[1]], judged("a", 0.5, 0.25)),
        session("b", 0.0, [[1]], judged("b", 1.0, 0.75)),
        session("c", 0.0, [[1]]),
    )
    measured = {name: value for name, value in found.items() if name.startswith("judge/")}
    assert measured == {"judge/score": 0.75, "judge/spread": 0.5, "judge/verifier": 0.5}
