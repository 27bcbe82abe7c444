"""``bridle bench algorithms``: the exact gradient, the recorded store, and a row for each part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridle.bench.algorithms_page import page
from bridle.recipes.learning.gradients import (
    GradientFigures,
    GradientSettings,
    bench_gradients,
    tables,
)
from bridle.recipes.learning.methods import METHODS, PLAIN, method
from bridle.recipes.learning.region import (
    bench_region,
    choice_advantages,
    expected_gradient,
    session_advantages,
)
from bridle.recipes.learning.tree import RIGHT, TREE, enumerated, record, recorded
from bridle.recipes.learning.world import play
from bridle.registry import Registry
from bridle.trainer.credit import ADVANTAGES
from bridle.trainer.credit.anchors import ANCHORS
from bridle.trainer.filters import FILTERS
from bridle.trainer.losses.importance import CORRECTIONS
from bridle.trainer.losses.losses import LOSSES
from bridle.trainer.losses.trust import TRUST_REGIONS

BUILT_IN = "bridle."
FEW = GradientSettings(sessions=512)


def test_the_sessions_are_all_enumerated_and_their_gradient_is_exact() -> None:
    exact = enumerated()
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(TREE.rows, TREE.ways)))
    probabilities = exact.probabilities(logits)
    assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-12)
    found = exact.gradient(logits, with_steps=True)
    rewards = torch.from_numpy(exact.solved + exact.steps)

    def expected(table: torch.Tensor) -> float:
        return float((exact.probabilities(table) * rewards).sum())

    for index in range(found.numel()):
        moved = torch.zeros(found.numel(), dtype=torch.float64)
        moved[index] = 1e-6
        step = moved.view_as(logits)
        slope = (expected(logits + step) - expected(logits - step)) / 2e-6
        assert float(found[index]) == pytest.approx(slope, abs=1e-8)


def test_sessions_are_drawn_as_they_are_enumerated() -> None:
    exact = enumerated()
    logits = tables(exact, 0)["sampler"]
    rng = np.random.default_rng(0)
    played = play(TREE, logits.log_softmax(-1).numpy(), RIGHT, 20_000, rng)
    solved = float((exact.probabilities(logits).numpy() * exact.solved).sum())
    assert np.mean([one.solved for one in played]) == pytest.approx(solved, abs=0.02)


def test_the_store_has_what_filters_look_for(tmp_path: Path) -> None:
    record(tmp_path / "tree.db", tables(enumerated(), 0)["sampler"], 64, 8, 0)
    sessions = recorded(tmp_path / "tree.db")
    assert len(sessions) == 64
    assert {len({sample.session_id for sample in one.samples}) for one in sessions} == {1}
    assert all(one.conservation.trained == one.conservation.captured for one in sessions)
    for name in FILTERS.names():
        kept = [FILTERS.get(name)(one) for one in sessions]
        assert 0 < sum(map(bool, kept)) < 64, name


@pytest.fixture(scope="module")
def compared() -> dict[str, dict[str, GradientFigures]]:
    names = ("no bias", "mean", "cispo", "weighting session", "importance none", "none")
    found = bench_gradients(FEW, [method(name) for name in names])
    return {one.method.name: one.figures for one in found}


def test_a_gradient_without_bias_is_the_exact_one(
    compared: dict[str, dict[str, GradientFigures]],
) -> None:
    for point in ("sampler", "lag"):
        figures = compared["no bias"][point]
        assert figures.bias < 3 * figures.bias_error
        assert figures.cosine > 0.98
        assert figures.length == pytest.approx(1.0, abs=0.2)


def test_known_biases_show(compared: dict[str, dict[str, GradientFigures]]) -> None:
    """Dr. GRPO's mean is (G - 1) / G of leave-one-out; session weights divide by the length."""
    whole = compared["no bias"]["sampler"].length
    mean = compared["mean"]["sampler"].length
    assert mean / whole == pytest.approx(7 / 8, rel=1e-4)
    assert compared["weighting session"]["sampler"].length < 0.7
    assert compared["none"] == {}


@pytest.mark.parametrize("seed", range(3))
def test_a_region_points_away_because_of_the_luck_in_a_session_s_advantage(seed: int) -> None:
    exact = enumerated()
    sampler = tables(exact, seed)["sampler"]
    here = exact.gradient(sampler, with_steps=False)
    for advantages in (session_advantages(exact, sampler), choice_advantages(exact, sampler)):
        found = expected_gradient(exact, sampler, sampler, advantages, "clip")
        assert torch.allclose(found, here, atol=1e-12)
    far = bench_region(seed)[-1]
    assert far.outside > 0.4
    assert far.without > 0.95
    assert far.by_session < -0.5
    assert far.by_choice >= 0


def test_the_page_has_a_row_for_each_method_and_a_reason_for_those_without_figures() -> None:
    chosen = [method("mean"), method("none")]
    text = page(bench_gradients(GradientSettings(sessions=64), chosen), FEW)
    assert "| none | not compared: its credit is 0 without a teacher |" in text
    assert "- **mean**: Dr. GRPO, arXiv 2503.20783. Assumes:" in text


def test_every_registered_part_has_a_row() -> None:
    configured = [one.configured(PLAIN) for one in METHODS]
    assert {one.advantages.baseline for one in configured} >= _own(ADVANTAGES)
    assert {one.advantages.anchor for one in configured} >= _own(ANCHORS)
    assert {one.loss.name for one in configured} >= _own(LOSSES)
    assert {one.loss.importance for one in configured} >= _own(CORRECTIONS)
    assert {one.loss.trust_region for one in configured} >= _own(TRUST_REGIONS)
    assert {name for one in configured for name in one.filters.extra} >= _own(FILTERS)
    assert len(METHODS) >= 25
    assert len({one.name for one in METHODS}) == len(METHODS)


def _own(registry: Registry[Any]) -> set[str]:
    """Return the names of Bridle's own parts; other tests may register further ones."""
    names = registry.names()
    return {name for name in names if registry.get(name).__module__.startswith(BUILT_IN)}
