"""Temperature, min-p, top-k and top-p: from logits to the distribution that a token is drawn from.

The engine samples with it and the trainer scores with it, so that both mean the same distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Truncation:
    """Settings of ``R`` rows; each is ``[R]``, and all are on one device."""

    temperature: Tensor
    """``float64``, above 0."""
    top_p: Tensor
    """``float64``; 1 means off."""
    top_k: Tensor
    """``int64``; 0 means off."""
    min_p: Tensor
    """``float64``; 0 means off."""

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Make settings from ``float64[R, 4]``: temperature, top-p, top-k and min-p."""
        temperature, top_p, top_k, min_p = values.unbind(1)
        return cls(temperature, top_p, top_k.long(), min_p)

    @property
    def truncates(self) -> bool:
        """Return whether any row leaves tokens out."""
        return bool(((self.top_p < 1.0) | (self.top_k > 0) | (self.min_p > 0.0)).any())

    def apply(self, scores: Tensor) -> Tensor:
        """Return ``scores`` over the temperature, ``-inf`` outside the set that may be drawn.

        The result is ``float[R, V]``. The scores have a gradient. The choice of the set has none.
        """
        scores = scores / self.temperature[:, None].to(scores.dtype)
        if not self.truncates:
            return scores
        return scores.masked_fill(~self.kept(scores), -torch.inf)

    @torch.no_grad()
    def kept(self, scores: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return ``bool[R, V]``: the tokens that may be drawn.

        The scores are over the temperature already. Min-p, top-k and top-p apply in this order, as
        in vLLM; the likeliest token is always kept. Ties are frequent in bfloat16. All tokens that
        are as likely as the k-th are kept, as vLLM's PyTorch sampler and FlashInfer keep them.
        Among the tokens as likely as the last one that top-p keeps, the number of kept ones is
        fixed, and their order decides which are kept. ``targets`` (``int64[R]``), the tokens that
        were drawn, come first in that order: they were kept, so the set is as large as the engine's
        and has them in it.
        """
        probabilities = scores.double().softmax(-1)
        least = self.min_p[:, None] * probabilities.max(-1, keepdim=True).values
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        places = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
        if targets is not None:
            # Swapped with the first token, so that a stable sort puts it before its equals.
            places = places.clone()
            places.scatter_(1, targets[:, None], 0)
            places[:, 0] = targets
            probabilities = probabilities.gather(1, places)
        ordered, order = probabilities.sort(descending=True, stable=True)
        last = (self.top_k[:, None] - 1).clamp(0, scores.shape[-1] - 1)
        within = (ordered >= ordered.gather(1, last)) | (self.top_k[:, None] < 1)
        ordered = ordered.masked_fill(~within, 0.0)
        before = ordered.cumsum(-1) - ordered
        within &= (before < self.top_p[:, None] * ordered.sum(-1, keepdim=True)) | (
            self.top_p[:, None] >= 1.0
        )
        within &= ordered > 0.0
        within[:, 0] = True
        return torch.zeros_like(within).scatter_(-1, places.gather(1, order), within)
