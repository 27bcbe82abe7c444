"""Windows, chunks, sinks and soft caps in trees: logprobs and gradients are those of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    Llama4TextConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    Starcoder2Config,
)
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from bridle.trainer.batch import attention
from bridle.trainer.batch.attention import first_seen
from bridle.trainer.batch.blocks import block_attention, plan_blocks
from bridle.trainer.batch.flex import flex_tree_attention, plan_mask
from bridle.trainer.batch.forest import Reach
from bridle.trainer.batch.packing import make_packs
from bridle.trainer.config import ComputeConfig, PackingConfig
from bridle.trainer.learner.sft_update import SftExample
from bridle.trainer.policy.exactness import exact_packing
from bridle.trainer.policy.model import load_policy, score_pack
from support.forest import one_prompt

WINDOW = 7
SLIDING = ["sliding_attention", "full_attention"]
MIXED: dict[str, Any] = {"layer_types": SLIDING, "sliding_window": WINDOW}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

FAMILIES: list[tuple[Any, dict[str, Any]]] = [
    (
        Gemma2Config,
        {**MIXED, "head_dim": 8, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0},
    ),
    (Gemma3TextConfig, {**MIXED, "head_dim": 8}),
    (GptOssConfig, {**MIXED, **EXPERTS, "head_dim": 8}),
    (Olmo3Config, MIXED),
    (Exaone4Config, {**MIXED, "sliding_window_pattern": 2}),
    (MistralConfig, {"sliding_window": WINDOW}),
    (MinistralConfig, {**MIXED, "head_dim": 8}),
    (MixtralConfig, {"sliding_window": WINDOW, **EXPERTS}),
    (Phi3Config, {"sliding_window": WINDOW, "pad_token_id": 0}),
    (Cohere2Config, MIXED),
    (SmolLM3Config, {**MIXED, "use_sliding_window": True, "pad_token_id": 0}),
    (Qwen2Config, {**MIXED, "use_sliding_window": True}),
    (Qwen3Config, {**MIXED, "use_sliding_window": True, "head_dim": 8}),
    (Starcoder2Config, {"sliding_window": WINDOW}),
    (DeepseekV2Config, LATENT),
    (DeepseekV3Config, LATENT),
    (Glm4MoeLiteConfig, LATENT),
    (
        Llama4TextConfig,
        {
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": WINDOW,
            "head_dim": 8,
            "intermediate_size_mlp": 64,
            "moe_layers": [],
            **EXPERTS,
        },
    ),
    (
        Gemma4TextConfig,
        {**MIXED, "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0},
    ),
]


def small(family: Any, settings: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return a random model of two layers, whose layers all change the logprobs."""
    config = family(
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
        }
        | settings
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith("sinks"):
                each.normal_()
    return model


def branching(generator: np.random.Generator) -> list[SftExample]:
    """Return short and long branches of two trees, behind a short prompt and a long one."""
    made = []
    for prompt in (3, 20):
        start = generator.integers(0, 64, prompt)
        turn = np.concatenate([start, generator.integers(0, 64, 5)])
        for before, reply in ((start, 2), (start, 30), (turn, 4), (turn, 19)):
            ids = np.concatenate([before, generator.integers(0, 64, reply)]).astype(np.uint32)
            made.append(SftExample(ids, np.arange(len(ids)) >= len(before)))
    return made


@pytest.mark.parametrize("block_tokens", [4, 256])
@pytest.mark.parametrize(
    ("family", "settings"), FAMILIES, ids=[family.__name__ for family, _ in FAMILIES]
)
def test_trees_have_the_logprobs_and_gradients_of_rows(family, settings, block_tokens, tmp_path):
    # Experts have no kernel for float64, and norms compute in float32 there.
    dtype = "float32" if "num_experts_per_tok" in settings else "float64"
    near = 1e-4 if dtype == "float32" else 1e-5
    model = small(family, settings, getattr(torch, dtype)).eval()
    model.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, dtype=dtype)
    packing = PackingConfig(layout="tree", block_tokens=block_tokens)
    assert exact_packing(policy, packing) == packing
    made = branching(np.random.default_rng(0))
    (pack,) = make_packs(made, packing)
    assert len(pack.token_ids) < pack.unshared_tokens
    found = score_pack(policy, pack, block_tokens=block_tokens).logprobs
    weights = torch.linspace(-1, 1, len(found), dtype=found.dtype)
    (found * weights).sum().backward()
    expected = torch.empty_like(found)
    for number, sequence in enumerate(made):
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        own = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        here = torch.from_numpy(pack.samples == number)
        offsets = torch.from_numpy(pack.offsets)[here]
        scores = own[offsets - 1, ids[offsets]]
        (scores * weights[here]).sum().backward()
        expected[here] = scores.detach()
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=near)
    wanted = dict(model.named_parameters())
    for name, each in policy.named_parameters():
        if wanted[name].grad is not None:
            largest = float(wanted[name].grad.abs().max())
            torch.testing.assert_close(
                each.grad, wanted[name].grad, rtol=0, atol=near * largest + 1e-8
            )


@pytest.mark.parametrize("length", [1, 5, 40])
def test_the_first_position_that_is_seen_is_found(length):
    positions = np.arange(length)
    rules = {
        "all": (causal_mask_function, 0 * positions),
        "window": (sliding_window_causal_mask_function(7), np.maximum(positions - 6, 0)),
        "chunks": (chunked_causal_mask_function(7, torch.zeros(1, dtype=int)), positions // 7 * 7),
    }
    for sees, expected in rules.values():
        np.testing.assert_array_equal(first_seen(sees, length), expected)


def test_layers_that_see_later_tokens_take_rows(tmp_path, caplog):
    settings = {**MIXED, "head_dim": 8, "use_bidirectional_attention": True}
    small(Gemma3TextConfig, settings, torch.float32).save_pretrained(tmp_path)
    assert exact_packing(load_policy(tmp_path), PackingConfig()).layout == "padded"
    assert "later ones" in caplog.text


def test_windows_keep_their_size_when_a_model_was_probed(tmp_path):
    small(MistralConfig, {"sliding_window": 64}, torch.float32).save_pretrained(tmp_path)
    policy: Any = load_policy(tmp_path)
    exact_packing(policy, PackingConfig())
    assert policy.config.sliding_window == 64


def test_a_model_that_ignores_a_window_in_trees_takes_rows(tmp_path, monkeypatch, caplog):
    """The probe's own branches are longer than the windows that it is probed with."""
    monkeypatch.setattr(attention, "first_seen", lambda _, length, __: np.zeros(length, np.int64))
    small(MistralConfig, {"sliding_window": 64}, torch.float32).save_pretrained(tmp_path)
    assert exact_packing(load_policy(tmp_path), PackingConfig()).layout == "padded"
    assert "its logprobs differ" in caplog.text


def test_keys_of_a_window_do_not_grow_with_the_prompt():
    counts = []
    for prompt in (200, 800):
        made = one_prompt(prompt, 10, 4)
        (pack,) = make_packs(made, PackingConfig())
        reach = Reach(pack.positions, np.maximum(pack.positions - 15, 0))
        plan = plan_blocks(pack.parents, 32, reach=reach)
        counts.append(sum(plan.key_counts) / len(pack.parents))
    assert counts[1] <= counts[0]


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [50, 300])
def test_flex_computes_windows_as_the_blocks_do(softcap, has_sinks, window):
    (pack,) = make_packs(one_prompt(200, 90, 3), PackingConfig())
    size = len(pack.parents)
    reach = Reach(pack.positions, np.maximum(pack.positions - window + 1, 0))
    query, key = (torch.randn(1, heads, size, 24) for heads in (4, 2))
    value = torch.randn(1, 2, size, 16)
    rest = (0.3, softcap, torch.randn(4) if has_sinks else None)
    mask = plan_mask(pack.parents, "cpu", torch.float32, reach)
    found = flex_tree_attention(query, key, value, mask, *rest)
    blocks = plan_blocks(pack.parents, 64, reach=reach)
    expected = block_attention(query, key, value, blocks, *rest)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "settings"), FAMILIES, ids=[family.__name__ for family, _ in FAMILIES]
)
def test_a_gpus_trees_are_its_rows_in_bfloat16(family, settings, tmp_path):
    """The prompt is longer than FlexAttention's blocks, and the window ends inside it."""
    settings = settings | {"max_position_embeddings": 1024}
    if settings.get("head_dim") == 8 and "qk_rope_head_dim" not in settings:
        settings |= {"head_dim": 16}
    settings |= {
        name: 100 for name in ("sliding_window", "attention_chunk_size") if name in settings
    }
    small(family, settings, torch.float32).save_pretrained(tmp_path)
    exact, policy = (
        load_policy(tmp_path, compute=ComputeConfig(device="cuda", precision=precision))
        for precision in ("float32", "bfloat16")
    )
    packing = PackingConfig(layout="tree")
    assert exact_packing(policy, packing) == packing
    made = one_prompt(300, 150, 4)
    found, rows = (gradients(policy, made, layout) for layout in ("tree", "padded"))
    expected = gradients(exact, made, "padded")
    assert float((found[0] - rows[0]).abs().mean()) <= 0.02 * float(rows[0].abs().mean())
    # Rounding sends some tokens of a mixture to other experts, in trees as in rows.
    off, usual = (float((each[1] - expected[1]).norm()) for each in (found, rows))
    assert off <= 1.5 * usual + 0.01 * float(expected[1].norm())


def gradients(
    policy: Any, made: list[SftExample], layout: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs of every target by sample and offset, and the gradient of their mean."""
    policy.zero_grad()
    (pack,) = make_packs(made, PackingConfig(layout=layout))
    scores = score_pack(policy, pack).logprobs
    scores.mean().backward()
    whole = [each.grad.flatten() for each in policy.parameters() if each.grad is not None]
    order = np.lexsort((pack.offsets, pack.samples))
    return scores.detach()[torch.from_numpy(order)], torch.cat(whole)
