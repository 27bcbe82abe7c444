"""Tiny policies, shaped as Qwen3 or Qwen3.5, with random weights: for demos, tests and benchmarks.

Everything that loads a policy (engine, trainer, vLLM) loads these like any other. Their tokenizers
come from :mod:`bridle.recipes.models.tiny_tokenizer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from bridle.recipes.models.packages import cache_directory
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.trainer.policy.durable import atomic_directory
from bridle.trainer.policy.model import save_policy

_TEXT: Final = (
    "What is 2 plus 3? The answer is 5. Answer in digits: 0123456789. You are a helpful assistant.",
    "The model reads a question, thinks, calls a tool and answers. Yes. No. Hello, world!",
)
"""The text from which the tokenizer of :func:`tiny_directory` is made."""


@dataclass(frozen=True)
class TinyShape:
    """Size of a tiny policy. Parameters are about ``12 * layers * hidden² + vocab * hidden``."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 256
    context: int = 4096
    tied: bool = True
    rope_theta: float = 1e4
    """Base of the rotary position embedding. With a larger one, distance changes attention less."""
    head_size: int | None = None
    """Numbers of a head; ``None``: ``hidden // heads``."""

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads


def tiny_directory(cache: Path | None = None) -> Path:
    """Return the directory of a policy with random weights, which is made at the first call.

    It has 70,000 parameters, so that a step of training takes seconds on one core. Its replies are
    noise.
    """
    directory = (cache or cache_directory()) / "models" / "tiny"
    if not directory.is_dir():
        with atomic_directory(directory) as made:
            size = train_tokenizer(made, _TEXT, vocab_size=384)
            shape = TinyShape(hidden=64, heads=2, kv_heads=1, intermediate=128, context=2048)
            make_policy(made, shape, vocab_size=size)
    return directory


def make_policy(directory: Path, shape: TinyShape, *, vocab_size: int, seed: int = 0) -> None:
    """Write a randomly initialised Qwen3 policy (float32 safetensors) beside its tokenizer."""
    torch.manual_seed(seed)
    config = Qwen3Config(**_dimensions(shape, vocab_size))
    _save(Qwen3ForCausalLM(config), directory)


def make_hybrid_policy(
    directory: Path, shape: TinyShape, *, vocab_size: int, seed: int = 0
) -> None:
    """Write a policy as :func:`make_policy` does, shaped as Qwen3.5.

    Three of every four layers are Gated DeltaNet.
    """
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        **_dimensions(shape, vocab_size, partial_rotary_factor=0.25),
        linear_key_head_dim=shape.head_dim,
        linear_value_head_dim=shape.head_dim,
        linear_num_key_heads=shape.kv_heads,
        linear_num_value_heads=shape.heads,
    )
    model = Qwen3_5ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            # At initialisation most states are forgotten from one token to the next.
            nn.init.uniform_(parameter, math.log(0.001), math.log(0.3))
    _save(model, directory)


def _dimensions(shape: TinyShape, vocab_size: int, **rope: float) -> dict[str, Any]:
    """Return the fields that the configurations of both families have."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta, **rope},
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }


def _save(model: PreTrainedModel, directory: Path) -> None:
    model.generation_config.eos_token_id = [2]
    model.generation_config.pad_token_id = 0
    save_policy(model, directory)
