"""Recurrent layers in trees: states are forked where branches part, exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.recipes.models.tiny import TinyShape, make_hybrid_policy
from bridle.trainer.batch.packing import make_packs
from bridle.trainer.batch.recurrence import CHUNK, plan_states
from bridle.trainer.config import PackingConfig
from bridle.trainer.learner.sft_update import SftExample
from bridle.trainer.policy.exactness import exact_packing
from bridle.trainer.policy.model import load_policy, score_pack

SHAPE = TinyShape(hidden=16, layers=4, heads=2, kv_heads=1, intermediate=16, context=512)
TREES = PackingConfig(layout="tree", max_tokens=4096)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("hybrid")
    make_hybrid_policy(directory, SHAPE, vocab_size=16, seed=3)
    return load_policy(directory)


def examples(*branches: list[int]) -> list[SftExample]:
    return [
        SftExample(np.asarray(each, np.uint32), np.arange(len(each)) > 0)
        for each in branches
        if len(each) > 1
    ]


def scored(model: Any, made: list[SftExample], packing: PackingConfig) -> dict[Any, torch.Tensor]:
    found = {}
    for pack in make_packs(made, packing):
        scores = score_pack(model, pack).logprobs
        keys = zip(pack.samples.tolist(), pack.offsets.tolist(), strict=True)
        found |= dict(zip(keys, scores, strict=True))
    return found


def test_qwen_3_5_is_trained_in_trees(hybrid: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert exact_packing(hybrid, TREES) == TREES
    assert not [each for each in caplog.records if each.name.startswith("bridle")]


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=6),
    st.integers(0, 2 * CHUNK),
)
def test_a_branch_scores_as_alone(hybrid: Any, tails: list[list[int]], shared: int) -> None:
    start = (np.arange(shared) % 7).tolist()
    made = examples(*([*start, *tail] for tail in tails))
    with torch.no_grad():
        trees = scored(hybrid, made, TREES)
        rows = scored(hybrid, made, replace(TREES, layout="padded", max_tokens=1))
    assert trees.keys() == rows.keys()
    for key, alone in rows.items():
        assert float(trees[key]) == pytest.approx(float(alone), abs=1e-5)


def test_gradients_are_those_of_rows(hybrid: Any) -> None:
    rng = np.random.default_rng(0)
    question, long, short = (rng.integers(0, 16, each).tolist() for each in (150, 90, 9))
    made = examples([*question, *long], [*question, *short], [*question, *long[:40], *short], short)
    gradients = []
    for layout in ("tree", "padded"):
        hybrid.zero_grad()
        sum(scored(hybrid, made, replace(TREES, layout=layout)).values()).backward()
        gradients.append([each.grad.clone() for each in hybrid.parameters()])
    hybrid.zero_grad()
    for ours, rows in zip(*gradients, strict=True):
        assert float((ours - rows).abs().max()) <= 1e-5 * float(rows.abs().max())


def test_segments_of_one_depth_are_computed_together() -> None:
    """A root of 100 tokens, which two segments of 10 tokens and one of 300 follow."""
    parents = np.concatenate(
        [np.arange(-1, 99), [99], np.arange(100, 109), [99], np.arange(110, 119), [99],
         np.arange(120, 419)]
    )  # fmt: skip
    plan = plan_states(parents)
    assert [each.segments for each in plan.rows] == [(0,), (1, 2), (3,)]
    assert [each.parents for each in plan.rows] == [(-1,), (0, 0), (0,)]
    assert [tuple(each.tokens.shape) for each in plan.rows] == [(1, 100), (2, 10), (1, 300)]
    rows = torch.cat([each.tokens.flatten() for each in plan.rows])
    assert rows[plan.places].tolist() == list(range(420))
