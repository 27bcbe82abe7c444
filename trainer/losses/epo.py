"""``epo``: clipping with an entropy bonus and a corridor for entropy (EPO, arXiv 2509.22576).

The paper's loss is ``L_PG - λ (H - β P)``. ``H`` is the mean entropy of all turns' tokens, and
``P`` the mean of a token's penalty: 0 if ``κ_l H̄ < H_t < κ_r H̄``, else a constant ``α``. ``H̄`` is
the mean entropy of earlier steps, and ``β`` follows a schedule. Two terms differ here:

- A constant has no gradient. The penalty is ``α`` times the distance from the corridor, in nats.
- ``H̄`` is the mean of ``-log μ`` over a branch, whose expectation is the entropy of the policy that
  sampled it. So the corridor needs no memory, and does not depend on how branches are packed.

``β`` is fixed. Both terms are weighted as the surrogate is: a token outside the trust region adds
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from bridle.trainer.config import AtLeastZero, LossConfig
from bridle.trainer.losses.losses import Surrogate, clip
from bridle.trainer.losses.terms import TokenTerms, branch_sums, differentiates_entropy


@dataclass(frozen=True, slots=True)
class EpoOptions:
    bonus: AtLeastZero = 0.001
    """The weight λ of the entropy terms."""
    smoothing: AtLeastZero = 1.0
    """The weight β of the corridor within them."""
    penalty: AtLeastZero = 1.0
    """The penalty α for each nat outside the corridor."""
    low: AtLeastZero = 0.8
    """The lower end κ_l of the corridor, as a share of the sampler's entropy."""
    high: AtLeastZero = 1.2
    """The upper end κ_r, likewise."""


_EPO: Final = EpoOptions()


@differentiates_entropy
def epo(terms: TokenTerms, config: LossConfig, options: EpoOptions = _EPO) -> Surrogate:
    """Compute PPO's clipped surrogate less the entropy terms.

    Raise ``ValueError`` for terms without entropies.
    """
    if terms.entropies is None:
        raise ValueError("epo needs the entropy of each token: compute them with score_pack")
    sums, counts = branch_sums(-terms.behaviour_logprobs, terms.branches)
    history = sums / counts
    low, high = options.low * history, options.high * history
    outside = (low - terms.entropies).clamp(min=0) + (terms.entropies - high).clamp(min=0)
    entropy = terms.entropies - options.smoothing * options.penalty * outside
    own = clip(terms, config)
    return replace(own, loss=own.loss - options.bonus * entropy, metrics={"corridor": outside})
