"""Importance weights: a correction for the engine's distribution differing from the trainer's.

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

Weights correct the size of an update; :mod:`bridle.trainer.losses.trust` bounds how far updates
carry the policy from the engine's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bridle.registry import Registry
from bridle.trainer.config import LossConfig
from bridle.trainer.losses.terms import TokenTerms, branch_sums

Correction = Callable[[TokenTerms, LossConfig], Tensor]
"""A function that returns the importance weight of each token, ``float[M]``. It is called without
gradients."""

CORRECTIONS: Registry[Correction] = Registry("importance correction", "bridle.corrections")


@torch.no_grad()
def importance_weights(terms: TokenTerms, config: LossConfig) -> Tensor:
    """Return the weights that ``config`` names, ``float[M]``."""
    return CORRECTIONS.configured(config.importance, config.options)(terms, config)


def _ratio(terms: TokenTerms) -> Tensor:
    return (terms.old_logprobs - terms.behaviour_logprobs).exp()


@CORRECTIONS.registered("truncate")
def truncate(terms: TokenTerms, config: LossConfig) -> Tensor:
    """Return the ratio of each token, at most the cap."""
    return _ratio(terms).clamp(max=config.importance_cap)


@CORRECTIONS.registered("mask")
def mask(terms: TokenTerms, config: LossConfig) -> Tensor:
    """Return the ratio of each token, 0 outside the floor and the cap."""
    ratio = _ratio(terms)
    outside = (ratio < config.importance_floor) | (ratio > config.importance_cap)
    return ratio.masked_fill(outside, 0.0)


@CORRECTIONS.registered("sequence")
def sequence(terms: TokenTerms, config: LossConfig) -> Tensor:
    """Return the ratio of each token's branch, at most the cap."""
    sums, _ = branch_sums(terms.old_logprobs - terms.behaviour_logprobs, terms.branches)
    return sums.exp().clamp(max=config.importance_cap)


@CORRECTIONS.registered("none")
def none(terms: TokenTerms, config: LossConfig) -> Tensor:
    """Return 1 for each token."""
    return torch.ones_like(terms.old_logprobs)
