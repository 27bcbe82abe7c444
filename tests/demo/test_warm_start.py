"""The lessons of a warm start, one after another, and one that is stopped between them."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from bridle.recipes.demo import stages
from bridle.recipes.demo.settings import DemoSettings, Lesson
from bridle.recipes.demo.stages import Places, lessons_taught, warm_start, warm_start_updates
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.trainer.sft.sft import SftStep

SETTINGS = dataclasses.replace(
    DemoSettings(),
    teacher_sessions=32,
    lessons=(
        Lesson(epochs=1, learning_rate=1e-3, shared=4),
        Lesson(epochs=2, learning_rate=1e-3, context=8),
        Lesson(epochs=1, learning_rate=1e-3),
    ),
)


def prepared(root: Path) -> Places:
    """A base policy and 32 demonstrations of one prompt with different ends."""
    places = Places(root)
    size = train_tokenizer(places.base, ["a few words to learn from"], vocab_size=300)
    shape = TinyShape(layers=1, hidden=32, heads=2, kv_heads=1, intermediate=32, context=64)
    make_policy(places.base, shape, vocab_size=size, seed=0)
    draw = np.random.default_rng(0)
    rows = [[*range(20), *draw.integers(20, 200, 12).tolist()] for _ in range(32)]
    table = {"token_ids": rows, "mask": [[False] * 24 + [True] * 8 for _ in rows]}
    parquet.write_table(pa.table(table), places.teacher_data)
    return places


def weights(places: Places) -> bytes:
    return (places.warm / "model.safetensors").read_bytes()


def test_a_warm_start_whose_time_is_over_ends_each_lesson(tmp_path: Path) -> None:
    places = prepared(tmp_path)
    losses: list[float] = []

    def on_step(step: SftStep) -> bool:
        losses.append(step.loss)
        return True

    warm_start(places, SETTINGS, on_step)
    assert len(losses) == len(SETTINGS.lessons)
    assert weights(places)


def test_a_warm_start_that_is_stopped_goes_on_after_its_last_whole_lesson(tmp_path: Path) -> None:
    whole, stopped = prepared(tmp_path / "whole"), prepared(tmp_path / "stopped")
    losses: list[float] = []
    warm_start(whole, SETTINGS, lambda step: losses.append(step.loss))
    assert len(losses) == warm_start_updates(SETTINGS)

    updates = itertools.count(1)

    def stop_in_the_last_lesson(_: SftStep) -> None:
        if next(updates) > warm_start_updates(SETTINGS, 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_start(stopped, SETTINGS, stop_in_the_last_lesson)
    assert lessons_taught(stopped, SETTINGS) == 2
    again: list[float] = []
    warm_start(stopped, SETTINGS, lambda step: again.append(step.loss))
    assert again == losses[-len(again) :]
    assert len(again) == warm_start_updates(SETTINGS) - warm_start_updates(SETTINGS, 2)
    assert weights(stopped) == weights(whole)
    assert sorted(each.name for each in (stopped.root / "policy").iterdir()) == ["base", "warm"]


def test_a_lesson_may_have_fewer_demonstrations_and_other_pieces_in_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[tuple[int, ...]]] = []

    def train_sft(_learner: object, examples: Any, config: Any, on_step: Any) -> None:
        seen.append([tuple(example.token_ids.tolist()) for example in examples])
        assert config.epochs == 1
        for _ in range(-(-len(examples) // config.batch_size)):
            on_step(None)

    monkeypatch.setattr(stages, "train_sft", train_sft)
    settings = dataclasses.replace(
        SETTINGS,
        lessons=(
            Lesson(epochs=4, learning_rate=1e-3, shared=2, piece=8),
            Lesson(epochs=1, learning_rate=1e-3, sessions=16),
        ),
    )
    steps: list[SftStep] = []
    warm_start(prepared(tmp_path), settings, steps.append)
    assert [len(examples) for examples in seen] == [4 * 32, 16]
    assert len({*seen[0]}) > 32, "an epoch's pieces are others"
    assert len(steps) == warm_start_updates(settings) == 4 * 32 // 16 + 1
