"""FlexAttention's mask of a forest: on a CPU its blocks and its result, on a GPU its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.trainer.batch import flex
from bridle.trainer.batch.blocks import block_attention, plan_blocks
from bridle.trainer.batch.flex import BLOCK, flex_tree_attention, plan_mask
from bridle.trainer.config import ComputeConfig, PackingConfig
from bridle.trainer.policy.exactness import exact_packing
from bridle.trainer.policy.model import load_policy
from support.forest import ancestor_mask

SIZES = [1, BLOCK - 1, BLOCK, 3 * BLOCK, 5 * BLOCK + 17]


def forest(size: int, seed: int) -> NDArray[np.int64]:
    """Return parents in depth-first order as ``int64[size]``.

    The lines branch anywhere, and now and then there is a root.
    """
    generator = np.random.default_rng(seed)
    parents, line = [-1], [0]
    for token in range(1, size):
        chance = generator.random()
        if chance < 0.02:
            line = line[: generator.integers(0, len(line)) + 1]
        if chance < 0.004:
            line = []
        parents.append(line[-1] if line else -1)
        line.append(token)
    return np.asarray(parents, np.int64)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_a_block_is_whole_partial_or_unseen_as_its_tokens_are(size, seed):
    parents = forest(size, seed)
    plan = plan_mask(parents, "cpu", torch.float32).mask
    count = -(-size // BLOCK)
    padding = (0, count * BLOCK - size)
    dense = ancestor_mask(np.pad(parents, padding, constant_values=-1))
    whole, partial = (
        [set(row[:many].tolist()) for row, many in zip(rows[0, 0], counts[0, 0], strict=True)]
        for rows, counts in (
            (plan.full_kv_indices, plan.full_kv_num_blocks),
            (plan.kv_indices, plan.kv_num_blocks),
        )
    )
    for query in range(count):
        for key in range(count):
            rows, columns = (slice(each * BLOCK, (each + 1) * BLOCK) for each in (query, key))
            block = dense[rows, columns]
            assert (key in whole[query]) == (bool(block.all()) and key < query)
            assert (key in whole[query] or key in partial[query]) == bool(block.any())


def states(size: int, device: str, dtype: torch.dtype) -> list[Any]:
    """Queries of four heads, keys and values of two."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, size, 32, generator=generator).to(device, dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize("size", SIZES)
def test_the_result_is_that_of_the_blocks(size):
    parents = forest(size, 0)
    query, key, value = (each.detach() for each in states(size, "cpu", torch.float32))
    found = flex_tree_attention(query, key, value, plan_mask(parents, "cpu", torch.float32), 0.3)
    expected = block_attention(query, key, value, plan_blocks(parents, 64), 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_capped_scores_can_be_compiled_as_on_a_gpu(monkeypatch):
    parents = forest(BLOCK, 0)
    query, key, value = states(BLOCK, "cpu", torch.float32)
    rest = (plan_mask(parents, "cpu", torch.float32), 0.3, 1.5)
    expected = flex_tree_attention(query, key, value, *rest)
    monkeypatch.setattr(flex, "flex_attention", flex._compiled())
    found = flex_tree_attention(query, key, value, *rest)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES[1:])
def test_gradients_on_a_gpu_are_those_of_float64(size):
    parents = forest(size, 0)
    ours = states(size, "cuda", torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in ours]
    found = flex_tree_attention(*ours, plan_mask(parents, "cuda", torch.bfloat16))
    expected = block_attention(*exact, plan_blocks(parents, 64, "cuda", torch.float64))
    upstream = torch.randn_like(found)
    found.backward(upstream)
    expected.backward(upstream.double())
    for mine, theirs in [(found, expected)] + [
        (mine.grad, theirs.grad) for mine, theirs in zip(ours, exact, strict=True)
    ]:
        assert (mine.double() - theirs).norm() <= 1e-2 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_gpus_packed_scores_are_a_lone_sequences(tmp_path, precision, recompute):
    make_policy(tmp_path, TinyShape(hidden=64, heads=2, kv_heads=1), vocab_size=64)
    compute = ComputeConfig(device="cuda", precision=precision, recompute=recompute)
    packing = PackingConfig(layout="tree")
    assert exact_packing(load_policy(tmp_path, compute=compute), packing) == packing
