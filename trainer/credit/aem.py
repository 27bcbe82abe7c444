"""``aem``: advantages modulated by the entropy of each reply (AEM, arXiv 2605.00425).

``H_t`` is the mean entropy of the tokens of step ``t``. ``H'_t`` is the same, min-max normalised
over the steps of the group. With a base advantage ``A``:

    ``α_t = exp(-λ H'_t) / mean(exp(-λ H'))``    ``A_t = α_t A``

So sure replies count more than unsure ones. While most advantages are negative, that keeps entropy
up; once most are positive, it lets entropy fall. Entropies are those of the sampler, estimated by
the mean of ``-log μ`` over the tokens that were drawn, whose expectation they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from bridle.errors import UsageError
from bridle.trainer.config import AtLeastZero, PartName
from bridle.trainer.credit.group import (
    ADVANTAGES,
    STD_EPSILON,
    Credit,
    CreditGroup,
    estimated,
    is_stepwise,
    register_advantage,
)


@dataclass(frozen=True, slots=True)
class AemOptions:
    base: PartName = "grpo"
    """The estimator of whole sessions that is modulated."""
    sharpness: AtLeastZero = 1.0
    """The exponent λ. With 0 nothing is modulated."""


_AEM: Final = AemOptions()


@register_advantage("aem")
def aem(group: CreditGroup, options: AemOptions = _AEM) -> Credit:
    """Multiply each step's advantage. Raise :class:`UsageError` for a base of single steps."""
    if options.base == "aem" or is_stepwise(ADVANTAGES.get(options.base)):
        raise UsageError(f"options.aem.base: {options.base!r} is not of whole sessions: use grpo")
    credit = estimated(group, options.base)
    if not group.steps:
        return credit
    surprise = np.asarray([-np.mean(group.logprobs(step)) for step in group.steps], np.float64)
    spread = float(np.ptp(surprise))
    weights = np.exp(-options.sharpness * (surprise - surprise.min()) / (spread + STD_EPSILON))
    factors = group.by_step(weights / weights.mean())
    return [
        [own * factor for own, factor in zip(parts, ours, strict=True)]
        for parts, ours in zip(credit, factors, strict=True)
    ]
