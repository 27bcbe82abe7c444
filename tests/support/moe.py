"""A tiny policy with experts, whose routers are not sure."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bridle.recipes.models.tiny_tokenizer import train_tokenizer

LAYERS, EXPERTS, TOP_K = 3, 8, 2
TEXTS = ["What is the capital of Norway? Oslo. Call lookup with 12 and answer: 3 + 4 = 7"] * 20


def make_moe_policy(directory: Path, *, hidden: int = 32, head_dim: int = 8) -> None:
    """Write a policy that has experts in all layers but the first, with its tokenizer."""
    size = train_tokenizer(directory, TEXTS, vocab_size=400)
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=48,
        moe_intermediate_size=hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        max_position_embeddings=512,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(directory)
