"""Trust regions: which tokens lie too far from the engine's distribution to be trained further.

PPO's clip compares ``π`` with ``π_old``, the policy at the start of the step. With one update a
step the two are equal, so it never acts, and tokens that lag behind by some versions are trained
however far the policy has moved since they were sampled. A trust region compares ``π`` with ``μ``,
the distribution that the engine sampled from. With ``r = π / μ`` of a token and ``A`` its
advantage, a token outside the region adds nothing to the gradient of the loss:

==============  ==========================================  ======================================
``clip``        ``r > 1 + high`` and ``A > 0``, or          the clip of PPO (arXiv 1707.06347, eq.
                ``r < 1 - low`` and ``A < 0``               7) measured from the behaviour policy.
                                                            AReaL (arXiv 2505.24298, §5.2) shows
                                                            why that and the importance weights
                                                            are two things.
``off_policy``  ``A < 0`` and                               off-policy sequence masking of
                ``-mean(log r over the branch) > nats``     DeepSeek-V3.2 (arXiv 2512.02556, eq. 9)
``none``        no token
==============  ==========================================  ======================================

``clip`` is one-sided for every token: it leaves out a good token that has become likelier already,
and a bad one that has become rarer. The tokens that the policy would move back towards ``μ`` keep
their gradient, which a two-sided mask would drop as well. Some of them are good choices of unlucky
sessions, so that outside the region the mean gradient leads back to ``μ`` where advantages are
those of whole sessions (:mod:`bridle.recipes.learning.region` has the exact figures). ``bridle
bench staleness`` compares the three. Where engine and trainer agree, as they do on-policy, nothing
is outside and the gradient is unchanged. Each token is decided by itself, so a long session is not
lost because of some of its tokens, as it is with the product of its ratios (TRL's
``sequence_mask``).

A token outside the region counts as trained in the account of tokens: whether it is outside depends
on the weights at the moment of the update, and with several updates a step it may be inside in one
of them. It keeps its share in the weights of its session, so the others do not weigh more. The
share of such tokens is the metric ``importance/outside``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bridle.registry import Registry
from bridle.trainer.config import LossConfig
from bridle.trainer.losses.terms import TokenTerms, branch_sums

TrustRegion = Callable[[TokenTerms, LossConfig], Tensor]
"""A function that returns which tokens are outside the region, ``bool[M]``. It is called without
gradients."""

TRUST_REGIONS: Registry[TrustRegion] = Registry("trust region", "bridle.trust_regions")


@torch.no_grad()
def outside_trust(terms: TokenTerms, config: LossConfig) -> Tensor:
    """Return the tokens that are outside the region that ``config`` names, ``bool[M]``."""
    return TRUST_REGIONS.configured(config.trust_region, config.options)(terms, config)


def _log_ratio(terms: TokenTerms) -> Tensor:
    return terms.logprobs - terms.behaviour_logprobs


@TRUST_REGIONS.registered("clip")
def clip(terms: TokenTerms, config: LossConfig) -> Tensor:
    """Return the tokens that have moved past the bound in the direction of their advantage."""
    ratio = _log_ratio(terms).exp()
    risen = (ratio > 1 + config.trust_high) & (terms.advantages > 0)
    fallen = (ratio < 1 - config.trust_low) & (terms.advantages < 0)
    return risen | fallen


@TRUST_REGIONS.registered("off_policy")
def off_policy(terms: TokenTerms, config: LossConfig) -> Tensor:
    """Return the tokens with negative advantages of branches that have become rarer.

    A branch has become rarer on average over its tokens.
    """
    sums, counts = branch_sums(_log_ratio(terms), terms.branches)
    return (-sums / counts > config.trust_nats) & (terms.advantages < 0)


@TRUST_REGIONS.registered("none")
def none(terms: TokenTerms, config: LossConfig) -> Tensor:
    """Return no token."""
    return torch.zeros_like(terms.logprobs, dtype=torch.bool)
