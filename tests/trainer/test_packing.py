"""Packs hold each prefix once, lose no target, shift no mask, and give the unpacked gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.trainer.batch.blocks import block_attention, plan_blocks
from bridle.trainer.batch.forest import subtree_ends
from bridle.trainer.batch.packing import make_packs, trained_length
from bridle.trainer.config import PackingConfig
from bridle.trainer.learner.sft_update import SftExample
from bridle.trainer.policy.model import score_pack, score_sequence
from support.forest import ancestor_mask, one_prompt


@st.composite
def sequences(draw):
    """Sequences over few ids, so that they share prefixes, with random masks."""
    made = []
    for _ in range(draw(st.integers(1, 7))):
        ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
        if made and draw(st.booleans()):
            ids = made[-1].token_ids.tolist()[: draw(st.integers(0, 12))] + ids
        mask = [False, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))]
        made.append(SftExample(np.asarray(ids, dtype=np.uint32), np.asarray(mask)))
    return made


def path_of(pack, token):
    """Ids from the root to ``token``."""
    path = []
    while token >= 0:
        path.append(int(pack.token_ids[token]))
        token = int(pack.parents[token])
    return path[::-1]


@given(sequences(), st.sampled_from(["tree", "flat", "padded"]), st.integers(1, 40))
def test_a_token_is_trained_from_exactly_the_tokens_before_it(made, layout, max_tokens):
    packs = make_packs(made, PackingConfig(layout=layout, max_tokens=max_tokens))
    seen = []
    for pack in packs:
        for source, target, sample, offset in zip(
            pack.sources, pack.targets, pack.samples, pack.offsets, strict=True
        ):
            ids = made[sample].token_ids.tolist()
            assert path_of(pack, int(source)) == ids[:offset]
            assert target == ids[offset]
            seen.append((int(sample), int(offset)))
    wanted = [(i, int(t)) for i, s in enumerate(made) for t in np.flatnonzero(s.mask)]
    assert sorted(seen) == wanted


@given(sequences())
def test_a_tree_pack_holds_every_prefix_once_at_its_depth_in_depth_first_order(made):
    packs = make_packs(made, PackingConfig(max_tokens=10_000))
    prefixes = {
        tuple(s.token_ids[:length].tolist())
        for s in made
        for length in range(1, trained_length(s) + 1)
    }
    assert sum(len(pack.token_ids) for pack in packs) == len(prefixes)
    for pack in packs:
        found = [tuple(path_of(pack, token)) for token in range(len(pack.token_ids))]
        assert set(found) == prefixes
        assert found == sorted(found)
        assert pack.positions.tolist() == [len(path) - 1 for path in found]


@given(sequences(), st.sampled_from(["tree", "flat"]), st.integers(1, 30))
def test_packs_keep_to_the_budget_unless_one_branch_alone_exceeds_it(made, layout, max_tokens):
    for pack in make_packs(made, PackingConfig(layout=layout, max_tokens=max_tokens)):
        held = {int(sample) for sample in pack.samples}
        largest = max(trained_length(made[sample]) for sample in held)
        if len(held) == 1 or largest <= max_tokens:
            assert len(held) == 1 or len(pack.token_ids) <= max_tokens
        else:
            assert layout == "tree"
            assert len(pack.token_ids) <= 2 * largest


def test_strangers_never_share_a_pack_with_a_branch_that_is_too_large():
    generator = np.random.default_rng(0)

    def session(length):
        ids = generator.integers(0, 1000, length).astype(np.uint32)
        return SftExample(ids, np.arange(length) >= length - 100)

    made = [session(30_000), session(30_000), *(session(500) for _ in range(4))]
    packs = make_packs(made, PackingConfig(max_tokens=8_192))
    homes = [sorted({int(sample) for sample in pack.samples}) for pack in packs]
    assert [0] in homes
    assert [1] in homes
    assert all(len(pack.token_ids) <= 8_192 for pack in packs if len(set(pack.samples)) > 1)


def test_token_zero_cannot_be_trained():
    with pytest.raises(ValueError, match="token 0"):
        trained_length(SftExample(np.asarray([1, 2]), np.asarray([True, False])))


@given(sequences(), st.integers(1, 6))
def test_blocks_see_exactly_the_ancestors(made, block_tokens):
    for pack in make_packs(made, PackingConfig(max_tokens=10_000)):
        dense = ancestor_mask(pack.parents)
        expected = np.zeros_like(dense)
        for token in range(len(pack.parents)):
            ancestor = token
            while ancestor >= 0:
                expected[token, ancestor] = True
                ancestor = int(pack.parents[ancestor])
        np.testing.assert_array_equal(dense, expected)
        assert subtree_ends(pack.parents).tolist() == [
            int(np.flatnonzero(dense[:, token])[-1]) + 1 for token in range(len(dense))
        ]
        blocks = plan_blocks(pack.parents, block_tokens)
        rebuilt = np.zeros_like(dense)
        row = key = 0
        counts = iter(blocks.key_counts)
        for queries, mask in zip(blocks.queries, blocks.masks, strict=True):
            own = slice(row, row + queries)
            if mask is None:
                assert queries >= block_tokens
                rebuilt[own, own] = np.tri(queries, dtype=np.bool_)
            else:
                seen = blocks.keys[key : key + (keys := next(counts))].numpy()
                rebuilt[own, seen] = mask.numpy() == 0
                key += keys
            row += queries
        np.testing.assert_array_equal(rebuilt, expected)


def test_block_attention_equals_dense_masked_attention_with_grouped_heads():
    generator = np.random.default_rng(0)
    made = [
        SftExample(
            np.concatenate([np.arange(9), generator.integers(0, 3, 20)]).astype(np.uint32),
            np.arange(29) > 8,
        )
        for _ in range(6)
    ]
    (pack,) = make_packs(made, PackingConfig())
    size = len(pack.token_ids)
    query = torch.randn(1, 4, size, 8, dtype=torch.float64)
    key, value = (torch.randn(1, 2, size, 8, dtype=torch.float64) for _ in range(2))
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    mask = torch.from_numpy(ancestor_mask(pack.parents))
    dense = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)
    plan = plan_blocks(pack.parents, 7, dtype=torch.float64)
    assert {mask is None for mask in plan.masks} == {True, False}
    blocked = block_attention(query, key, value, plan)
    torch.testing.assert_close(blocked, dense, rtol=1e-12, atol=1e-12)


def test_a_line_is_one_block_without_a_mask():
    lines = [
        SftExample(np.arange(60, dtype=np.uint32) + first, np.arange(60) > 0) for first in (0, 9)
    ]
    (pack,) = make_packs(lines, PackingConfig())
    plan = plan_blocks(pack.parents, 16)
    assert (plan.queries, plan.masks, plan.key_counts) == ((59, 59), (None, None), ())


def random_session(generator, prompt):
    """Two branches: a common prompt, a common first turn, then different second turns."""
    first = generator.integers(0, 64, 8)
    return [
        SftExample(
            np.concatenate([prompt, first, generator.integers(0, 64, length)]).astype(np.uint32),
            np.concatenate([np.zeros(len(prompt)), np.full(8, trained), np.ones(length)]) > 0,
        )
        for length, trained in ((5, 1), (11, 0))
    ]


@pytest.mark.parametrize("layout", ["tree", "flat", "padded"])
@pytest.mark.parametrize("max_tokens", [45, 50, 70, 10_000])
def test_packed_gradients_equal_the_unpacked_ones(double_policy, layout, max_tokens):
    generator = np.random.default_rng(3)
    prompt = generator.integers(0, 64, 30)
    made = [branch for _ in range(4) for branch in random_session(generator, prompt)]
    coefficients = [torch.randn(len(s.token_ids), dtype=torch.float64) for s in made]

    expected_logprobs = []
    for sequence, weights in zip(made, coefficients, strict=True):
        trained = np.flatnonzero(sequence.mask)
        logprobs = score_sequence(double_policy, sequence.token_ids.astype(np.int64))[trained - 1]
        (weights[trained] * logprobs).sum().backward()
        expected_logprobs.append(dict(zip(trained.tolist(), logprobs.tolist(), strict=True)))
    expected = [parameter.grad.clone() for parameter in double_policy.parameters()]
    double_policy.zero_grad()

    packs = make_packs(
        made,
        PackingConfig(layout=layout, max_tokens=max_tokens),
    )
    assert len(packs) > 1 or max_tokens == 10_000
    for pack in packs:
        scores = score_pack(double_policy, pack, block_tokens=16)
        chosen = [coefficients[s][t] for s, t in zip(pack.samples, pack.offsets, strict=True)]
        (torch.stack(chosen) * scores.logprobs).sum().backward()
        for sample, offset, logprob in zip(
            pack.samples, pack.offsets, scores.logprobs.tolist(), strict=True
        ):
            assert logprob == pytest.approx(expected_logprobs[sample][int(offset)], rel=1e-9)

    for parameter, gradient in zip(double_policy.parameters(), expected, strict=True):
        scale = gradient.abs().max()
        assert (parameter.grad - gradient).abs().max() <= 1e-9 * scale


def test_a_prompt_shared_by_a_batch_is_computed_once():
    made = one_prompt(300, 21, 32)
    (pack,) = make_packs(made, PackingConfig())
    assert pack.unshared_tokens == 32 * 320
    assert 300 + 32 * 15 < len(pack.token_ids) <= 300 + 32 * 20


@settings(max_examples=20)
@given(sequences())
def test_tree_and_padded_packs_score_alike(double_policy_shared, made):
    scored = {}
    for layout in ("tree", "padded"):
        for pack in make_packs(made, PackingConfig(layout=layout, max_tokens=40)):
            with torch.no_grad():
                values = score_pack(double_policy_shared, pack, block_tokens=4).logprobs.tolist()
            for sample, offset, value in zip(pack.samples, pack.offsets, values, strict=True):
                scored.setdefault((int(sample), int(offset)), []).append(value)
    for values in scored.values():
        assert len(values) == 2
        assert values[0] == pytest.approx(values[1], rel=1e-9)


def test_a_prompt_longer_than_the_budget_is_still_shared():
    made = one_prompt(1000, 51, 40)
    packs = make_packs(made, PackingConfig(max_tokens=500))
    assert max(len(pack.token_ids) for pack in packs) <= 2 * 1050
    assert sum(len(pack.token_ids) for pack in packs) < 40 * 1050 / 8
