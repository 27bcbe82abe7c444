"""Test the figures of a step's sessions, and its distance, against values computed by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bridle.reconstruct.samples.sample import Episode, Turn
from bridle.store.diagnostics import DIAGNOSTICS, declared, table
from bridle.store.records import CallKind, CallStatus
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.prepare import TrainItem, prepare
from bridle.trainer.config import GrpoConfig
from bridle.trainer.learner.probe import Probe, Probing
from support.episodes import one_branch

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def turn(name: str, role: str | None = None, **more: object) -> Turn:
    return Turn(name, CallKind.MAIN, CallStatus.COMPLETE, role=role, **more)  # type: ignore[arg-type]


def session(
    name: str, task: str, reward: float, turns: Sequence[Turn], seconds: float, *more: Reward
) -> Episode:
    given = [Reward(name, "reward", reward, 1.0, source=RewardSource.VERIFIER), *more]
    made = one_branch(name, [([1, 2], one.role) for one in turns], given, "completed")
    record = dataclasses.replace(
        made.session,
        group_id=task,
        task_suite="s",
        task_split="train",
        task_id=task,
        created_at=10.0,
        sealed_at=10.0 + seconds,
    )
    own = tuple(
        dataclasses.replace(one, call_id=f"{name}{number}") for number, one in enumerate(turns)
    )
    return dataclasses.replace(made, session=record, turns=own)


def style(name: str, value: float) -> Reward:
    return Reward(name, "style", value, 1.0, source=RewardSource.SCORER)


def test_a_step_is_measured_by_its_parts() -> None:
    good = turn("x", "planner", tool_calls=1)
    bad = turn("x", "worker", parse_failed=True)
    cut = turn("x", "worker", finish_reason="length")
    step = prepare(
        [
            session("a", "one", 1.0, [good, good, cut], 1.0, style("a", 0.5)),
            session("b", "one", 0.0, [good, bad], 3.0, style("b", 0.25)),
            session("c", "two", 0.0, [good], 6.0),
            session("d", "two", 0.0, [cut], 2.0),
        ],
        0,
        GrpoConfig(),
    )
    found = step.signal
    assert {
        name: value for name, value in found.items() if name.startswith("reward/")
    } == pytest.approx(
        {
            "reward/task/one": 0.5,
            "reward/task/two": 0.0,
            "reward/role/planner": 1 / 3,
            "reward/role/worker": 1 / 3,
            "reward/name/reward": 0.25,
            "reward/name/style": 0.375,
            "reward/turns/1": 0.0,
            "reward/turns/2-3": 0.5,
        }
    )
    # One of two attempts at one task passed, none at the other.
    assert (found["pass/at_1"], found["pass/at_2"]) == (0.25, 0.5)
    assert (found["length/solved"], found["length/failed"]) == (1.0, 1.0)
    assert found["length/cut"] == pytest.approx(2 / 7)
    assert found["tools/failed"] == pytest.approx(1 / 5)
    # The second group teaches nothing, so of 12 seconds 4 were useful.
    assert found["slots/useful"] == pytest.approx(4 / 12)
    # Three tokens of the success, two of the failure, at ±1/√2 (deviation of the sample).
    assert (
        found["advantage/max"] == -found["advantage/min"] == pytest.approx(math.sqrt(0.5), rel=1e-5)
    )
    assert found["advantage/positive"] == pytest.approx(3 / 5)
    assert found["advantage/p50"] == found["advantage/max"]


def test_sessions_from_their_start_have_a_figure_where_others_re_enter() -> None:
    whole = [session(f"w{n}", "one", float(n), [turn("x")], 1.0) for n in range(2)]
    branch = session("b", "one", 1.0, [turn("x")], 1.0)
    origin = dataclasses.replace(branch.session, origin_session_id="w0", origin_call_id="w00")
    branch = dataclasses.replace(branch, session=origin)
    assert prepare([*whole, branch], 0, GrpoConfig()).signal["reward/whole"] == 0.5
    assert "reward/whole" not in prepare(whole, 0, GrpoConfig()).signal


def test_a_step_of_many_tasks_has_no_figure_of_each() -> None:
    many = [session(f"s{n}", f"t{n}", 0.0, [turn("x")], 1.0) for n in range(17)]
    found = prepare(many, 0, GrpoConfig()).signal
    assert not [name for name in found if name.startswith("reward/task/")]
    assert found["pass/at_1"] == 0.0


def test_a_step_without_sessions_has_no_figures() -> None:
    assert prepare([], 0, GrpoConfig()).signal == {}


class Scoring:
    """Gives every token but the first the same logprob, which a test changes."""

    logprob = -1.0

    def scores(self, probes: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.full(len(each) - 1, self.logprob, np.float32) for each in probes]


def items(*lengths: int) -> list[TrainItem]:
    made = []
    for number, calls in enumerate(lengths):
        episode = one_branch(f"s{number}", [([1, 2], None)] * calls, [])
        (sample,) = episode.samples
        made.append(TrainItem(sample, number, number, np.ones(len(sample.mask), np.float32)))
    return made


def test_the_distance_of_a_step_and_from_the_start_is_that_of_the_probes() -> None:
    policy, probing = Scoring(), Probing()
    probing.before(policy, items(3, 2))
    assert [len(ids) for ids in probing.start.ids] == [6], "the shortest alone"
    policy.logprob = -1.2
    k3 = {shift: math.expm1(shift) - shift for shift in (-0.2, -0.5, -0.3)}
    expected = {"kl/step": k3[-0.2], "kl/start": k3[-0.2]}
    assert probing.after(policy) == pytest.approx(expected, rel=1e-5)
    probing.before(policy, items(4, 5))
    policy.logprob = -1.5
    expected = {"kl/step": k3[-0.3], "kl/start": k3[-0.5]}
    assert probing.after(policy) == pytest.approx(expected, rel=1e-5)
    kept = Probe.of_data(probing.start.as_data())
    assert kept.divergence(policy.scores(kept.ids)) == pytest.approx(k3[-0.5], rel=1e-5)


def test_a_probe_is_a_small_share_of_long_branches_or_none() -> None:
    assert Probe.of(items(400, 500)).ids == ()
    assert Probing().after(Scoring()) == {}  # type: ignore[arg-type]
    several = Probe.of(items(*range(1, 200)))
    tokens = sum(map(len, several.ids))
    assert len(several.ids) > 10
    assert tokens <= 0.01 * sum(3 * calls for calls in range(1, 200))


def test_each_number_is_declared_once_and_found_by_its_name() -> None:
    names = [one.name for one in DIAGNOSTICS]
    assert len(set(names)) == len(names)
    found = {name: declared(name) for name in ("kl/sampler/lag_12", "update/entropy", "update/x")}
    assert [one.name for one in found.values() if one] == [
        "kl/sampler/lag_*",
        "update/entropy",
        "update/*",
    ]
    assert declared("nothing/of_it") is None


def test_the_page_has_the_numbers_as_they_are_declared() -> None:
    assert table() in PAGE.read_text()
