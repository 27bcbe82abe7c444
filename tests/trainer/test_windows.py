"""Windows, chunks, sinks and soft caps in trees: logprobs and gradients are those of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3nTextConfig,
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

from bridle.trainer.batch.attention import first_seen
from bridle.trainer.batch.packing import make_packs
from bridle.trainer.config import PackingConfig
from bridle.trainer.learner.sft_update import SftExample
from bridle.trainer.policy.exactness import exact_packing
from bridle.trainer.policy.model import load_policy, score_pack

WINDOW = 7
SLIDING = ["sliding_attention", "full_attention"]
MIXED: dict[str, Any] = {"layer_types": SLIDING, "sliding_window": WINDOW}
EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
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
    (Gemma4TextConfig, {**MIXED, "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0}),
]


def small(family: Any, settings: dict[str, Any]) -> Any:
    """Return a random model of two layers in float64, whose layers all change the logprobs."""
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
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith("sinks"):
                each.normal_()
    return model


def branching(generator: np.random.Generator) -> list[SftExample]:
    """Return branches of two trees: behind a long prompt and a short one, short and long replies."""
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
    model = small(family, settings).eval()
    model.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, dtype="float64")
    packing = PackingConfig(layout="tree", block_tokens=block_tokens)
    assert exact_packing(policy, packing) == packing
    made = branching(np.random.default_rng(0))
    (pack,) = make_packs(made, packing)
    assert len(pack.token_ids) < pack.unshared_tokens
    found = score_pack(policy, pack, block_tokens=block_tokens).logprobs
    weights = torch.linspace(-1, 1, len(found), dtype=torch.float64)
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
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-5)
    wanted = dict(model.named_parameters())
    for name, each in policy.named_parameters():
        if wanted[name].grad is not None:
            largest = float(wanted[name].grad.abs().max())
            torch.testing.assert_close(
                each.grad, wanted[name].grad, rtol=0, atol=1e-5 * largest + 1e-8
            )
