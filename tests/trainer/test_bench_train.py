"""``bridle bench train``: its batches are what they are said to be, and trained alike both ways."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bridle.bench import train
from bridle.bench.train import TrainFigures, TrainSettings, batches, bench_policies, bench_train
from bridle.trainer.config import PackingConfig

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


def test_every_width_makes_both_models() -> None:
    assert TrainSettings().shape == train.SHAPE
    wide = TrainSettings(hidden=2048).shape
    assert (wide.heads, wide.kv_heads) == (16, 8)
    with bench_policies(replace(SMALL, hidden=640)) as load:
        for model in ("qwen3", "qwen3.5"):
            assert load(model).config.hidden_size == 640


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
