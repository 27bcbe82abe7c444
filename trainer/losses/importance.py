"""Importance weights: how far the engine's distribution is from the trainer's.

With ``ρ = π_old / μ`` of a token, ``C`` the cap and ``F`` the floor; without gradient:

============  ====================================  ===============================================
``truncate``  ``min(ρ, C)``                         token-level truncated importance sampling (Yao
                                                    et al. 2025, "Your efficient RL framework
                                                    secretly brings you off-policy RL training")
``mask``      ``ρ`` where ``F <= ρ <= C``, else 0   IcePop (Ling team 2025, arXiv 2510.18855)
``sequence``  ``min(Π ρ over the branch, C)``       sequence-level truncated importance sampling
                                                    (Liu et al. 2025, "When speed kills stability")
``none``      1
============  ====================================  ===============================================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bridle.trainer.config import LossConfig


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Of ``M`` tokens."""

    weights: Tensor
    """``float[M]``, without gradient."""
    bounded: Tensor
    """``bool[M]``: whose weight is not its ratio; for the metrics."""


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor, behaviour_logprobs: Tensor, branches: Tensor, config: LossConfig
) -> ImportanceWeights:
    """The weights that ``config`` names; all tensors ``[M]``. A branch's tokens must all be here
    for ``sequence``."""
    log_ratio = old_logprobs - behaviour_logprobs
    cap = config.importance_cap
    match config.importance:
        case "truncate":
            ratio = log_ratio.exp()
            return ImportanceWeights(ratio.clamp(max=cap), ratio > cap)
        case "mask":
            ratio = log_ratio.exp()
            outside = (ratio < config.importance_floor) | (ratio > cap)
            return ImportanceWeights(ratio.masked_fill(outside, 0.0), outside)
        case "sequence":
            number, places = torch.unique(branches, return_inverse=True)
            sums = torch.zeros(len(number), dtype=log_ratio.dtype, device=log_ratio.device)
            ratio = sums.index_add(0, places, log_ratio).exp()[places]
            return ImportanceWeights(ratio.clamp(max=cap), ratio > cap)
        case "none":
            ones = torch.ones_like(log_ratio)
            return ImportanceWeights(ones, torch.zeros_like(ones, dtype=torch.bool))
