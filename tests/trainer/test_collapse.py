"""Test the warnings of a collapse: in time where a run collapses, and none in a healthy one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from bridle.diagnosis.findings.collapse import CollapseWatch, collapses
from bridle.store.records import Metric
from support import tiny_runs

STEPS, BEGINS, HALVES = 60, 30, 45
"""The steps of a made series at which a figure begins to drift, and at which the reward halves."""
FRESH = 1000
"""The first seed: the thresholds were chosen on lower ones."""
Series = dict[str, np.ndarray[Any, np.dtype[np.float64]]]


def healthy(seed: int) -> Series:
    """Return the figures of a run that gets better, with the noise of small steps."""
    rng = np.random.default_rng(seed)
    gain = np.linspace(0, 1, STEPS)

    def noisy(middle: Any, width: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.clip(middle + rng.normal(0, width, STEPS), 0, None)

    return {
        "reward/mean": noisy(0.3 + 0.3 * gain, 0.05),
        "reward/std": noisy(0.4, 0.03),
        "reward/min": np.zeros(STEPS),
        "reward/max": np.ones(STEPS),
        "update/entropy": noisy(1.5 - 0.9 * gain, 0.05),
        "update/grad_norm": noisy(1.0, 0.3),
        "signal/calls": noisy(8.0, 0.5),
        "signal/reply_tokens": noisy(120.0, 10.0),
        "signal/repeats": noisy(0.05, 0.02),
        "signal/group_std": noisy(0.3, 0.05),
        "signal/top_group": noisy(0.4, 0.1),
        "signal/length_reward": rng.normal(0, 0.25, STEPS),
        "groups/collected": np.full(STEPS, 8.0),
        "groups/zero_variance": rng.integers(0, 4, STEPS).astype(float),
        "judge/score": noisy(0.5, 0.03),
        "judge/spread": noisy(0.1, 0.03),
        "judge/verifier": noisy(0.5, 0.03),
    }


def drift(series: Series, name: str, target: float, slowly: bool = True) -> None:
    """Move a figure to ``target`` in eight steps, or at once."""
    part = np.clip((np.arange(STEPS) - BEGINS) / (8 if slowly else 1), 0, 1)
    series[name] = series[name] * (1 - part) + target * part


def spike(series: Series) -> None:
    series["update/grad_norm"][BEGINS + 5 : BEGINS + 9 : 2] = 20.0


def longer(series: Series) -> None:
    drift(series, "signal/length_reward", 0.8)
    drift(series, "signal/reply_tokens", 240.0)


def one_task(series: Series) -> None:
    drift(series, "signal/top_group", 0.99)
    drift(series, "groups/zero_variance", 7.0)


def at_bound(series: Series) -> None:
    drift(series, "reward/std", 0.0)
    drift(series, "reward/mean", 1.0)


def fewer_calls(series: Series) -> None:
    drift(series, "signal/calls", 3.0)
    drift(series, "signal/reply_tokens", 250.0)


MADE: Mapping[str, tuple[str, Callable[[Series], None]]] = {
    "equal rewards": ("reward_variance_cliff", lambda own: drift(own, "signal/group_std", 0.02)),
    "certainty": ("entropy_collapse", lambda own: drift(own, "update/entropy", 0.1)),
    "spike": ("gradient_spikes", spike),
    "fewer calls": ("fewer_calls_longer_replies", fewer_calls),
    "loops": ("repeated_thoughts", lambda own: drift(own, "signal/repeats", 0.6)),
    "length": ("length_rewarded", longer),
    "one task": ("one_task_carries", one_task),
    "bound": ("rewards_at_bound", at_bound),
    "flattery": ("judge_drift", lambda own: drift(own, "judge/score", 0.9)),
    "judges differ": ("judge_drift", lambda own: drift(own, "judge/spread", 0.6)),
}


def made(collapse: Callable[[Series], None], seed: int) -> Series:
    """Return a run whose reward stands still, or rises, from the collapse until it halves."""
    series = healthy(seed)
    series["reward/mean"][BEGINS:] = series["reward/mean"][BEGINS - 5 : BEGINS].mean()
    collapse(series)
    series["reward/mean"][HALVES:] *= 0.4
    return series


def warnings(series: Mapping[str, Mapping[int, float]]) -> dict[str, int]:
    """Return the names of the warnings, each with the step that showed it first."""
    found: dict[str, int] = {}
    watch = CollapseWatch()
    for step in range(1 + max(max(own) for own in series.values())):
        numbers = {name: own[step] for name, own in series.items() if step in own}
        for one in watch.add(step, numbers):
            found[one.name] = step
    return found


def by_step(series: Series) -> dict[str, dict[int, float]]:
    return {name: dict(enumerate(own.tolist())) for name, own in series.items()}


@pytest.mark.parametrize("name", MADE)
def test_a_made_collapse_is_named_before_the_reward_halves(name: str) -> None:
    expected, collapse = MADE[name]
    for seed in range(FRESH, FRESH + 10):
        found = warnings(by_step(made(collapse, seed)))
        assert BEGINS <= found[expected] <= HALVES - 3, (seed, found)
        assert min(found.values()) >= BEGINS, (seed, found)


def test_noise_alone_is_no_collapse() -> None:
    found = {seed: warnings(by_step(healthy(seed))) for seed in range(FRESH, FRESH + 50)}
    assert not any(found.values()), found


RECORDED = json.loads(tiny_runs.RECORDED.read_text())


def recorded(name: str) -> dict[str, dict[int, float]]:
    return {
        figure: {int(step): value for step, value in own.items()}
        for figure, own in RECORDED[name].items()
    }


def test_no_healthy_run_of_twenty_has_a_warning() -> None:
    found = {name: warnings(recorded(name)) for name in tiny_runs.HEALTHY}
    assert len(found) == 20
    assert not any(found.values()), found


def first_half(rewards: list[float]) -> int:
    """Return the first step whose reward is half of the best median of three steps before."""
    best = 0.0
    for step, value in enumerate(rewards):
        if value <= best / 2:
            return step
        best = max(best, float(np.median(rewards[max(0, step - 2) : step + 1])))
    raise AssertionError(f"the reward never halves: {rewards}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("length", "length_rewarded"),
        ("spam", "repeated_thoughts"),
        ("silence", "fewer_calls_longer_replies"),
        ("coin", "entropy_collapse"),
        ("flattery", "judge_drift"),
    ],
)
def test_a_real_collapse_is_named_before_the_reward_halves(name: str, expected: str) -> None:
    run = recorded(name)
    halves = first_half(list(run["reward/mean"].values()))
    found = warnings(run)
    assert found[expected] <= halves - 3, (halves, found)


def test_the_whole_run_has_the_same_warnings_as_the_run_at_work() -> None:
    series = by_step(made(MADE["certainty"][1], 0))
    metrics = [
        Metric("r", step, name, value, 0.0)
        for name, own in series.items()
        for step, value in own.items()
    ]
    (finding,) = collapses(metrics)
    step = warnings(series)[finding.name]
    assert finding.evidence.startswith(f"Step {step + 1}: ")
    assert "nats a token" in finding.evidence
    resumed = CollapseWatch()
    resumed.resume(metrics, step + 1)
    assert resumed.add(step + 1, {name: own[step + 1] for name, own in series.items()}) == []
