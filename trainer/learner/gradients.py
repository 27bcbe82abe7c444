"""The norm of a gradient by kinds of layers, from the norms that clipping needs anyway."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from bridle.trainer.policy.sharding import number

_KINDS: Final = (
    ("norms", re.compile(r"norm|\bln(_|\d|\b)|layernorm")),
    ("head", re.compile(r"lm_head|embed_out|output_layer")),
    ("embeddings", re.compile(r"embed|\bwte\b|\bwpe\b")),
    ("attention", re.compile(r"attn|attention|mixer")),
    ("mlp", re.compile(r"mlp|expert|feed_forward|ffn|moe|router")),
)
"""The kinds by the first pattern that a parameter's name matches. Adapters are of the kind of the
layer that they are in, and a tied output head is an embedding."""
OTHERS: Final = "others"
_EPS: Final = 1e-6
"""The number that PyTorch's clipping adds to the norm."""


def kind_of_layer(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), OTHERS)


@torch.no_grad()
def clipped_norms(model: nn.Module, most: float) -> tuple[float, Mapping[str, float]]:
    """Scale the gradients to a global norm of ``most`` at most.

    Return their global norm before, and the norm of each kind of layer that has a gradient.
    """
    kinds: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            kinds.setdefault(kind_of_layer(name), []).append(parameter)
    norms = {kind: get_total_norm(_gradients(own)) for kind, own in kinds.items()}
    found = {kind: number(norm) for kind, norm in norms.items()}
    total = sum(value * value for value in found.values()) ** 0.5
    if most < total < float("inf"):
        for gradient in _gradients(own for of in kinds.values() for own in of):
            gradient.mul_(most / (total + _EPS))
    return total, found


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [each.grad for each in parameters if each.grad is not None]
