"""Drift of the policy in training from its tokens' samplers, as sums that packs add up.

It is measured before a step's first update, with the log ratios ``log π/μ`` of the trained tokens.
The quantiles come from a histogram, so that a step of millions of tokens over several processes
costs a few kilobytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WIDTH: Final = 0.01
"""Width of a bin in nats, which is the relative error of a quantile."""
_FARTHEST: Final = 10.0
"""Largest log ratio of the histogram, in nats; farther ones are counted in the outermost bins."""
_BINS: Final = 2 * round(_FARTHEST / _WIDTH) + 1


def _no_tokens() -> NDArray[np.int64]:
    return np.zeros(_BINS, np.int64)


@dataclass(frozen=True, slots=True)
class Drift:
    """The distance of some tokens' policy from their samplers."""

    histogram: NDArray[np.int64] = field(default_factory=_no_tokens)
    """Number of tokens by ``log π/μ``."""
    least: float = float("inf")
    """The smallest ``log π/μ``."""
    tokens: Counter[int] = field(default_factory=Counter)
    """Number of tokens by the versions that they lag behind."""
    kl: Mapping[int, float] = field(default_factory=dict)
    """The sum of the tokens' estimates of KL(μ ‖ π) in nats, by lag."""

    @classmethod
    @torch.no_grad()
    def of(cls, logprobs: Tensor, behaviour_logprobs: Tensor, lags: Tensor) -> Drift:
        """Measure ``M`` tokens.

        ``lags`` is ``int64[M]`` on the CPU. Tokens whose ratio is not finite are left out, because
        the update that they belong to is not taken.
        """
        log_ratio = (logprobs - behaviour_logprobs).double().cpu().numpy()
        finite = np.isfinite(log_ratio)
        if not finite.any():
            return cls()
        log_ratio, behind = log_ratio[finite], lags.numpy()[finite]
        bins = np.rint(np.clip(log_ratio, -_FARTHEST, _FARTHEST) / _WIDTH).astype(np.int64)
        # k3 of Schulman, "Approximating KL divergence" (2020), for tokens of μ.
        estimates = np.expm1(log_ratio) - log_ratio
        tokens: Counter[int] = Counter()
        kl: dict[int, float] = {}
        for lag in np.unique(behind).tolist():
            here = behind == lag
            tokens[lag] += int(here.sum())
            kl[lag] = float(estimates[here].sum())
        return cls(
            np.bincount(bins + _BINS // 2, minlength=_BINS), float(log_ratio.min()), tokens, kl
        )

    def __add__(self, other: Drift) -> Drift:
        lags = self.kl.keys() | other.kl.keys()
        return Drift(
            self.histogram + other.histogram,
            min(self.least, other.least),
            self.tokens + other.tokens,
            {lag: self.kl.get(lag, 0.0) + other.kl.get(lag, 0.0) for lag in lags},
        )

    def quantile(self, share: float) -> float:
        """Return the ratio ``π/μ`` that ``share`` of the tokens do not exceed, to 1%."""
        reached = np.cumsum(self.histogram) >= share * self.histogram.sum()
        return float(np.exp((int(np.argmax(reached)) - _BINS // 2) * _WIDTH))

    def metrics(self) -> dict[str, float]:
        """Return the drift as named numbers; empty if there were no tokens.

        ``kl/sampler`` is KL(μ ‖ π) of all tokens, and ``kl/sampler/lag_N`` that of tokens that lag
        N versions behind. ``kl/engine`` is that of tokens that do not lag, for which both have the
        same weights.
        """
        total = self.tokens.total()
        if not total:
            return {}
        by_lag = {lag: self.kl[lag] / n for lag, n in sorted(self.tokens.items())}
        return {
            "importance/min": float(np.exp(self.least)),
            **{f"importance/p{100 * q:02.0f}": self.quantile(q) for q in (0.01, 0.5, 0.99)},
            "kl/sampler": sum(self.kl.values()) / total,
            **{f"kl/sampler/lag_{lag}": value for lag, value in by_lag.items()},
            **({"kl/engine": by_lag[0]} if 0 in by_lag else {}),
        }
