"""Attention in parts without masks: each query sees its ancestors once, and gradients are exact."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.trainer.batch.spans import plan_spans, plan_tree_spans, span_attention
from support.forest import ancestor_mask


@st.composite
def forests(draw):
    """``int64[N]``: parents in depth-first order, each a token's on the path to the one before."""
    parents = [-1]
    for _ in range(draw(st.integers(0, 25))):
        path = [-1, len(parents) - 1]
        while path[-1] >= 0:
            path.append(parents[path[-1]])
        straight = draw(st.booleans())
        parents.append(path[1] if straight else draw(st.sampled_from(path[:-1])))
    return np.asarray(parents, np.int64)


def seen_by(spans, count):
    """Count how often a query is given a key: ``int64[queries, keys]``."""
    queries = count if spans.wanted is None else len(spans.wanted)
    seen = np.zeros((queries, count), np.int64)
    for part in spans.parts:
        queries = part.queries.stop - part.queries.start
        if part.mask is not None:
            given = part.mask.numpy() == 0
        else:
            given = np.tri(queries, dtype=np.int64) if part.diagonal else 1
        seen[part.queries, part.keys] += given
    return seen


@given(forests(), st.integers(1, 8), st.data())
def test_every_query_is_given_each_ancestor_once(parents, block_tokens, data):
    expected = ancestor_mask(parents)
    wanted = data.draw(st.sets(st.integers(0, len(parents) - 1), min_size=1))
    plan = plan_tree_spans(parents, np.asarray(sorted(wanted)), block_tokens)
    np.testing.assert_array_equal(seen_by(plan.inner, len(parents)), expected)
    np.testing.assert_array_equal(seen_by(plan.last, len(parents)), expected[sorted(wanted)])
    diagonal = [part.diagonal for part in plan.inner.parts]
    assert diagonal == sorted(diagonal, reverse=True)


def bushy_forest(tokens):
    generator = np.random.default_rng(0)
    parents = [-1]
    while len(parents) < tokens:
        branch = len(parents) - 1
        for _ in range(int(generator.integers(0, 3))):
            branch = max(parents[branch], 0)
        parents.append(branch)
        parents.extend(range(len(parents) - 1, len(parents) + int(generator.integers(0, 20))))
    return np.asarray(parents[:tokens], np.int64)


@pytest.mark.parametrize("wanted", [None, np.arange(3, 190, 4)])
def test_outputs_and_gradients_equal_those_of_a_dense_mask(wanted):
    parents = bushy_forest(200)
    size = len(parents)
    every = np.arange(size)
    plan = plan_tree_spans(parents, every if wanted is None else wanted, 16, torch.float64)
    spans = plan.inner if wanted is None else plan.last
    kinds = {(part.diagonal, part.mask is None) for part in spans.parts}
    assert kinds >= {(True, False), (False, True)}
    query = torch.randn(1, 4, size, 8, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(1, 2, size, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    mask = torch.from_numpy(ancestor_mask(parents))
    dense = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)
    found = span_attention(query, key, value, spans, 0.3)
    read = torch.from_numpy(every if wanted is None else wanted)
    torch.testing.assert_close(found[:, :, read], dense[:, :, read], rtol=1e-12, atol=1e-12)
    upstream = torch.randn(1, 4, len(read), 8, dtype=torch.float64)
    leaves = (query, key, value)
    ours = torch.autograd.grad(found[:, :, read], leaves, upstream)
    theirs = torch.autograd.grad(dense[:, :, read], leaves, upstream)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_rounded_queries_are_merged_in_float32():
    parents = np.arange(-1, 511)
    query, key, value = (torch.randn(1, 1, 512, 16) for _ in range(3))
    halves = [each.bfloat16() for each in (query, key, value)]
    few = span_attention(*halves, plan_spans(parents, 512, torch.bfloat16))
    many = span_attention(*halves, plan_spans(parents, 8, torch.bfloat16))
    assert many.dtype == torch.bfloat16
    exact = span_attention(*(each.float() for each in halves), plan_spans(parents, 512))
    errors = [float((each.float() - exact).abs().mean()) for each in (few, many)]
    assert errors[1] <= 1.2 * errors[0]
