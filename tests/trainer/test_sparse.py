"""Models that attend by an index are trained up to its length and refused beyond."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bridle.trainer.batch.packing import make_packs
from bridle.trainer.batch.prepare import TrainItem
from bridle.trainer.config import GrpoConfig, PackingConfig, SftConfig
from bridle.trainer.learner.optimizer import make_optimizer
from bridle.trainer.learner.rates import resolved
from bridle.trainer.learner.sft_update import fit_batch
from bridle.trainer.learner.update import update_policy
from bridle.trainer.policy.model import load_policy, score_pack, score_sequence
from bridle.trainer.policy.sparse import SequenceTooLong, index_limit

LIMIT = 16


@pytest.fixture(params=["tree", "flat", "padded"])
def packing(request) -> PackingConfig:
    return PackingConfig(layout=request.param)


@pytest.fixture
def indexed(policy):
    policy.config.index_topk = LIMIT
    return policy


def test_a_branch_as_long_as_the_index_is_scored_and_a_longer_one_refused(
    indexed, make_sample, packing
):
    def pack(tokens):
        samples = [make_sample([*range(tokens)], [tokens - 1]), make_sample([1, 2, 3], [2])]
        return make_packs(samples, packing)[-1]

    # The last token of a sample is predicted, not read.
    assert score_pack(indexed, pack(LIMIT + 1)).logprobs.isfinite().all()
    with pytest.raises(SequenceTooLong, match=f"{LIMIT} tokens"):
        score_pack(indexed, pack(LIMIT + 2))
    assert len(score_sequence(indexed, np.arange(LIMIT + 1))) == LIMIT
    with pytest.raises(SequenceTooLong):
        score_sequence(indexed, np.arange(LIMIT + 2))


def test_a_pack_longer_than_the_index_is_scored_where_its_branches_are_not(indexed, make_sample):
    samples = [make_sample([first, *range(10)], [10]) for first in range(4)]
    (pack,) = make_packs(samples, PackingConfig())
    assert len(pack.token_ids) > LIMIT
    assert score_pack(indexed, pack).logprobs.isfinite().all()


def test_an_update_refuses_before_it_computes_anything(indexed, make_sample):
    samples = [make_sample([1, 2], [1]), make_sample([*range(30)], [29])]
    items = [
        TrainItem(sample, number, number, np.ones(len(sample.token_ids), np.float32))
        for number, sample in enumerate(samples)
    ]
    config = GrpoConfig()
    optimizer = make_optimizer(indexed, resolved(config).optimizer)
    before = [parameter.detach().clone() for parameter in indexed.parameters()]
    with pytest.raises(SequenceTooLong, match="max-model-len"):
        update_policy(indexed, optimizer, items, config, step=0, version=0)
    for old, new in zip(before, indexed.parameters(), strict=True):
        assert torch.equal(old, new)


def test_imitation_refuses_longer_examples_too(indexed, make_sample):
    config = SftConfig()
    optimizer = make_optimizer(indexed, resolved(config).optimizer)
    with pytest.raises(SequenceTooLong):
        fit_batch(indexed, optimizer, [make_sample([*range(30)], [29])], config)


def test_an_index_of_blocks_counts_their_tokens(policy):
    assert index_limit(policy) is None
    policy.config.index_topk_blocks, policy.config.index_block_size = 4, 8
    assert index_limit(policy) == 32


def tiny(kind):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "index_topk": LIMIT,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "max_position_embeddings": 128,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse"],
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_the_families_that_have_an_index_are_scored_as_themselves_up_to_it_and_refused_beyond(
    kind, make_sample, tmp_path
):
    torch.manual_seed(0)
    tiny(kind).save_pretrained(tmp_path)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = load_policy(tmp_path)
    assert index_limit(model) == LIMIT
    ids = np.arange(1, 41) % 60
    with torch.no_grad():
        logits = own(input_ids=torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
        expected = logits[torch.arange(39), torch.from_numpy(ids[1:])]
        found = score_sequence(model, ids[: LIMIT + 1])
    torch.testing.assert_close(found, expected[:LIMIT], rtol=0, atol=1e-4)
    with pytest.raises(SequenceTooLong):
        score_sequence(model, ids)
