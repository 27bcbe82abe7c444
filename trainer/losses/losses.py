"""Policy-gradient losses on flat token tensors.

All tensors have shape ``[M]``: one entry per trained token of a pack, of whichever session. With
``π`` the policy being trained, ``π_old`` the policy at the start of the step, ``μ`` the
distribution that the engine reports, ``r = π / π_old`` and ``A`` the advantage:

=========  =========================================================  ==========================
``clip``   ``-min(r A, clip(r, 1 - ε_low, 1 + ε_high) A)``            PPO, arXiv 1707.06347 eq. 7;
                                                                      GRPO; ε_high > ε_low: DAPO
                                                                      (arXiv 2503.14476)
``gspo``   the same with ``s`` for ``r``, where                       arXiv 2507.18071
           ``s = exp(mean over the branch of log r)``
``cispo``  ``-sg(min(r, 1 + ε_high)) A log π``                        MiniMax-M1, arXiv 2506.13585
``aepo``   ``clip`` balanced by entropy (:mod:`.aepo`)                arXiv 2510.14545
``epo``    ``clip`` with an entropy bonus (:mod:`.epo`)               arXiv 2509.22576
=========  =========================================================  ==========================

Each token's loss is multiplied by its importance weight
(:mod:`bridle.trainer.losses.importance`), which is 0 outside the trust region
(:mod:`bridle.trainer.losses.trust`). The KL penalty ``β k3`` is added, or ``β (π / μ) k3`` if
``kl_corrected`` is set, the entropy bonus of :mod:`bridle.trainer.losses.entropy` is subtracted
while it is on, and the batch loss is the sum over tokens times the weights of
:mod:`bridle.trainer.credit.weighting`. ``sg`` stops gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bridle.registry import Registry
from bridle.trainer.config import LossConfig
from bridle.trainer.losses.importance import importance_weights
from bridle.trainer.losses.terms import ENTROPY_GRADIENT, TokenTerms, branch_sums
from bridle.trainer.losses.trust import outside_trust


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The result of a loss for each of ``M`` tokens, before weights, correction and penalty."""

    loss: Tensor
    """``float[M]``, with gradient."""
    ratio: Tensor
    """``float[M]``: the ratio that was clipped; for the metrics."""
    clipped: Tensor
    """``bool[M]``: true if the clip has cut off or bounded the token's gradient; for the
    metrics."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Further numbers of each token, ``float[M]``, whose means are logged as ``update/NAME``."""


Loss = Callable[[TokenTerms, LossConfig], Surrogate]

LOSSES: Registry[Loss] = Registry(
    "loss",
    "bridle.losses",
    {"aepo": "bridle.trainer.losses.aepo:aepo", "epo": "bridle.trainer.losses.epo:epo"},
)


def register_loss(name: str) -> Callable[[Loss], Loss]:
    """Return a decorator that makes a function the loss that configurations name ``name``."""
    return LOSSES.registered(name)


def needs_entropy_gradient(config: LossConfig) -> bool:
    """Return whether the configured loss is marked by :func:`.terms.differentiates_entropy`."""
    return bool(getattr(LOSSES.get(config.name), ENTROPY_GRADIENT, False))


class LossSums(dict[str, float]):
    """Sums over tokens by name, so that packs add up; divide by ``tokens`` for means.

    ``tokens``; ``loss``, already weighted; ``clipped``: tokens whose gradient the clip has cut off
    or bounded; ``ratio``; ``kl_old``: k3 estimate of KL(π_old ‖ π), nats; ``kl_reference`` where
    there is a reference policy; ``importance``: the weights as used, so 0 outside the trust region;
    ``importance_squares``: their squares; ``outside``: tokens outside the trust region; and what a
    loss adds (:attr:`Surrogate.metrics`). The first update of a step has ``π = π_old``, so
    ``clipped``, ``ratio`` and ``kl_old`` are informative only in a step with several updates.
    """

    def __add__(self, other: Mapping[str, float]) -> LossSums:
        names = dict.fromkeys([*self, *other])
        return LossSums({name: self.get(name, 0.0) + other.get(name, 0.0) for name in names})

    def mean(self, name: str) -> float:
        """Return the mean per token of one of the sums; 0 if there were no tokens."""
        tokens = self.get("tokens", 0.0)
        return self.get(name, 0.0) / tokens if tokens else 0.0


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return ``-min(r A, clip(r) A)`` per token."""
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def branch_ratio(log_ratio: Tensor, branches: Tensor) -> Tensor:
    """Return GSPO's ``s``: the geometric mean of each branch's token ratios, at each of its tokens.

    A branch's tokens must all be here.
    """
    sums, counts = branch_sums(log_ratio, branches)
    return (sums / counts).exp()


def cispo_surrogate(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, clip_high: float
) -> Tensor:
    """Return ``-sg(min(r, 1 + ε_high)) A log π`` per token.

    Every token keeps a gradient, of bounded weight.
    """
    return -ratio.clamp(max=1 + clip_high).detach() * advantages * logprobs


@register_loss("clip")
def clip(terms: TokenTerms, config: LossConfig) -> Surrogate:
    """Compute PPO's clipped surrogate on token ratios."""
    return _clipped((terms.logprobs - terms.old_logprobs).exp(), terms, config)


@register_loss("gspo")
def gspo(terms: TokenTerms, config: LossConfig) -> Surrogate:
    """Compute the clipped surrogate on one ratio for each branch."""
    ratio = branch_ratio(terms.logprobs - terms.old_logprobs, terms.branches)
    return _clipped(ratio, terms, config)


@register_loss("cispo")
def cispo(terms: TokenTerms, config: LossConfig) -> Surrogate:
    """Compute REINFORCE with a clipped ratio as its weight."""
    ratio = (terms.logprobs - terms.old_logprobs).exp()
    loss = cispo_surrogate(terms.logprobs, ratio, terms.advantages, config.clip_high)
    return Surrogate(loss, ratio, ratio > 1 + config.clip_high)


def _clipped(ratio: Tensor, terms: TokenTerms, config: LossConfig) -> Surrogate:
    low, high, advantages = config.clip_low, config.clip_high, terms.advantages
    above, below = ratio > 1 + high, ratio < 1 - low
    return Surrogate(
        clipped_surrogate(ratio, advantages, low, high),
        ratio,
        (above & (advantages > 0)) | (below & (advantages < 0)),
    )


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return an unbiased, non-negative estimate of KL(π ‖ other) from tokens of π, per token.

    It is ``x - 1 - log x`` with ``x = other / π``; Schulman, "Approximating KL divergence" (2020).
    """
    difference = other_logprobs - logprobs
    return difference.exp() - 1 - difference


def policy_loss(
    terms: TokenTerms, config: LossConfig, entropy_bonus: float = 0.0
) -> tuple[Tensor, LossSums]:
    """Return the weighted loss of a pack's tokens and the sums to report.

    The loss is a scalar with gradient. ``entropy_bonus`` is the coefficient of
    :mod:`bridle.trainer.losses.entropy`; unless it is 0, the entropies need a gradient.
    """
    surrogate = LOSSES.configured(config.name, config.options)(terms, config)
    importance = importance_weights(terms, config)
    outside = outside_trust(terms, config)
    kept = importance.masked_fill(outside, 0.0)
    per_token = kept * surrogate.loss
    kl_reference = None
    if terms.reference_logprobs is not None:
        kl_reference = k3(terms.logprobs, terms.reference_logprobs)
        if config.kl_corrected:
            drawn = importance * (terms.logprobs - terms.old_logprobs).exp()
            kl_reference = drawn * kl_reference
        per_token = per_token + config.kl_coefficient * kl_reference
    if entropy_bonus:
        assert terms.entropies is not None  # noqa: S101 - score_pack has computed them
        per_token = per_token - entropy_bonus * terms.entropies
    loss = (terms.weights * per_token).sum()
    return loss, _stats(terms, loss, surrogate, kept, outside, kl_reference)


@torch.no_grad()
def _stats(
    terms: TokenTerms,
    loss: Tensor,
    surrogate: Surrogate,
    importance: Tensor,
    outside: Tensor,
    kl_reference: Tensor | None,
) -> LossSums:
    log_ratio = terms.logprobs - terms.old_logprobs
    sums = {
        "tokens": float(len(log_ratio)),
        "loss": float(loss.detach()),
        "clipped": float(surrogate.clipped.sum()),
        "ratio": float(surrogate.ratio.sum()),
        # Tokens came from π_old, so the estimate runs from it to π.
        "kl_old": float((log_ratio.exp() - 1 - log_ratio).sum()),
        "importance": float(importance.sum()),
        "importance_squares": float(importance.square().sum()),
        "outside": float(outside.sum()),
        **{name: float(values.sum()) for name, values in surrogate.metrics.items()},
    }
    if kl_reference is not None:
        sums["kl_reference"] = float(kl_reference.sum())
    return LossSums(sums)
