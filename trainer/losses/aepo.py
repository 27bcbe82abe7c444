"""``aepo``: clipping and advantages balanced by entropy (AEPO, arXiv 2510.14545, section 3.3).

With ``r = π / π_old``, ``H`` a token's entropy and ``sg`` the stop of gradients:

- ``A' = A (1 + a norm(H))`` with ``norm(H) = (H - mean(H)) / (std(H) + 1e-6)``
- ``-min(r A', clip(r, 1 - ε_low, (1 + ε_high) r / sg(r)) A')``

So a good token that is likelier already keeps a gradient, of the weight ``1 + ε_high``. The paper
takes mean and deviation over a group's tokens. Here they are the branch's, so that they do not
depend on how branches are packed. Its branching of rollouts is no part of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from bridle.trainer.config import AtLeastZero, LossConfig
from bridle.trainer.losses.losses import Surrogate
from bridle.trainer.losses.terms import TokenTerms, branch_sums


@dataclass(frozen=True, slots=True)
class AepoOptions:
    entropy_weight: AtLeastZero = 0.2
    """The weight a of a token's entropy in its advantage."""


_AEPO: Final = AepoOptions()


def aepo(terms: TokenTerms, config: LossConfig, options: AepoOptions = _AEPO) -> Surrogate:
    """Compute the clipped surrogate that keeps the gradient of tokens above the clip.

    Raise ``ValueError`` for terms without entropies.
    """
    if terms.entropies is None:
        raise ValueError("aepo needs the entropy of each token: compute them with score_pack")
    entropies = terms.entropies.detach()
    sums, counts = branch_sums(entropies, terms.branches)
    apart = entropies - sums / counts
    squares, _ = branch_sums(apart.square(), terms.branches)
    normalized = apart / ((squares / counts).sqrt() + 1e-6)
    advantages = terms.advantages * (1 + options.entropy_weight * normalized)
    ratio = (terms.logprobs - terms.old_logprobs).exp()
    bound = (1 + config.clip_high) * ratio / ratio.detach()
    clipped = torch.minimum(ratio.clamp(min=1 - config.clip_low), bound)
    above, below = ratio > 1 + config.clip_high, ratio < 1 - config.clip_low
    return Surrogate(
        -torch.minimum(ratio * advantages, clipped * advantages),
        ratio,
        (above & (advantages > 0)) | (below & (advantages < 0)),
    )
