"""``bridle bench train``: its batches are what they are said to be, and trained alike both ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from bridle.bench import longest, train
from bridle.bench.longest import LongestFigures
from bridle.bench.train import (
    SHAPES,
    TrainFigures,
    TrainSettings,
    batches,
    bench_policies,
    bench_train,
)
from bridle.trainer.config import PackingConfig
from bridle.trainer.policy.compute import UnsupportedCompute

SMALL = TrainSettings(
    turns=5, question=20, thinking=6, answer=4, result=8, sessions=8, prompt=60, tail=6, lines=4,
    line=40, max_tokens=512,
)  # fmt: skip


@pytest.fixture(scope="module")
def figures() -> dict[str, TrainFigures]:
    with pytest.MonkeyPatch.context() as patch, bench_policies(SMALL) as load:
        patch.setattr(train, "ENOUGH_S", 0.0)
        patch.setattr(train, "_peak_mib", lambda *_: 0.0)
        return {each.name: bench_train(load(each.model), each, SMALL) for each in batches(SMALL)}


def test_trees_and_rows_have_the_same_gradients(
    figures: dict[str, TrainFigures],
) -> None:
    assert len(figures) == 4
    for found in figures.values():
        assert found.max_rel_grad_diff <= 1e-5


def test_every_shape_has_whole_heads() -> None:
    for shape in SHAPES.values():
        assert shape.model.heads % shape.model.kv_heads == 0
        assert shape.hybrid.layers >= 4
    assert SHAPES["4b"].model.head_dim == 128


def test_adapters_alone_are_trained() -> None:
    settings = replace(SMALL, lora_rank=2)
    with bench_policies(settings) as load:
        model = load("qwen3")
        (batch,) = (each for each in batches(settings) if each.name == "branching")
        kept, _ = train._gradients(model, batch.items, PackingConfig(max_tokens=512))
    assert 0 < len(kept) == sum(".lora_" in name for name, _ in model.named_parameters())


def test_the_peak_is_what_a_step_holds_at_a_time() -> None:
    (batch,) = (each for each in batches(SMALL) if each.name == "shared_prompt")
    with bench_policies(SMALL) as load:
        model = load("qwen3")
        peaks = [
            train._peak_mib(model, items, PackingConfig(max_tokens=512, layout="padded"))
            for items in (batch.items[:1], batch.items[:4])
        ]
    assert 0.1 < 2 * peaks[0] < peaks[1]


def test_the_ratio_counts_each_shared_token_once(
    figures: dict[str, TrainFigures],
) -> None:
    branching, shared, linear = (figures[name] for name in ("branching", "shared_prompt", "linear"))
    # The last token of a sample is not computed.
    rows = sum(20 + turn * 12 + 10 - 1 for turn in range(5))
    assert branching.tokens_ratio == pytest.approx(rows / branching.tokens)
    assert branching.tokens == 20 + 5 * (10 - 1) + 4 * 12
    assert shared.tokens_ratio == pytest.approx(8 * 65 / (60 + 8 * 5))
    assert linear.tokens_ratio == pytest.approx(1.0)


def test_steps_take_turns_and_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0, 3, 3, 8, 8, 10, 10, 14])
    monkeypatch.setattr(train, "_now", lambda device: next(seconds))
    monkeypatch.setattr(train, "ENOUGH_S", 7.0)
    order: list[str] = []
    assert train.fastest([lambda: order.append("a"), lambda: order.append("b")], "cpu") == [2, 4]
    assert order == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("room", "fits", "refused"),
    [(100_000, 98_304, 114_688), (40_000, 32_768, 40_960), (1_000, 0, 16_384)],
)
def test_the_longest_session_is_found_by_halves(
    monkeypatch: pytest.MonkeyPatch, room: int, fits: int, refused: int
) -> None:
    def step(_model: Any, length: int) -> LongestFigures | None:
        return LongestFigures(length, None, 1.0, 1.0) if length <= room else None

    monkeypatch.setattr(longest, "_step", step)
    monkeypatch.setattr(longest, "one_step", lambda *_: None)
    found = longest.longest_session(nn.Identity(), 1 << 20, print)
    assert (found.tokens, found.refused) == (fits, refused)


def test_a_device_that_takes_every_length_refuses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest, "one_step", lambda *_: None)
    monkeypatch.setattr(
        longest, "_step", lambda _model, length: LongestFigures(length, None, 1.0, 1.0)
    )
    found = longest.longest_session(nn.Identity(), 40_000, print)
    assert (found.tokens, found.refused) == (32_768, None)


def test_a_policy_in_bfloat16_scores_a_little_differently() -> None:
    with bench_policies(SMALL) as load:
        found = longest.rounding(load("qwen3"), "cpu")
    assert 0 < found.mean <= found.p99 <= found.largest < 0.1


def test_the_longest_session_is_not_looked_for_on_a_cpu() -> None:
    with pytest.raises(UnsupportedCompute, match="use --device cuda"):
        longest.measure_longest(lambda _model: nn.Identity(), SMALL, 1 << 20, print)
