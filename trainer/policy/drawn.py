"""The distributions that targets were drawn from: temperature, and the set of ids that was left.

Where the engine reported the ids that a token was drawn from, exactly these are left. Otherwise the
set is that of the policy's own logits under the sampler's top-k, top-p and min-p, with the target
in any case; near the set's edge, it may differ from the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bridle.engine.embedded.truncation import Truncation


@dataclass(frozen=True, slots=True)
class Drawn:
    """The sampler of each of ``M`` targets."""

    settings: Tensor
    """``float64[M, 4]``: temperature, top-p, top-k and min-p."""
    counts: Tensor
    """``int64[M]``: number of ids that the target was drawn from; 0 if they are not recorded."""
    ids: Tensor
    """``int64[sum(counts)]``: these ids, one target's after another's."""

    def to(self, device: torch.device) -> Drawn:
        return Drawn(self.settings.to(device), self.counts.to(device), self.ids.to(device))

    def of(self, wanted: Tensor) -> Drawn:
        """Return the samplers of the targets ``wanted``, ``int64[W]``."""
        counts = self.counts[wanted]
        starts = (self.counts.cumsum(0) - self.counts)[wanted]
        before = counts.cumsum(0) - counts
        places = torch.arange(int(counts.sum()), device=counts.device)
        places += (starts - before).repeat_interleave(counts)
        return Drawn(self.settings[wanted], counts, self.ids[places])

    def apply(self, logits: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits that the targets were drawn from, and each target's row of them.

        ``logits`` are ``[R, V]``, and target ``targets[m]`` is predicted from row ``rows[m]``. The
        result is ``-inf`` outside the set that was left. It has a row for each different state,
        sampler, recorded set and, where the sampler truncates, target.
        """
        numbers = torch.arange(1, len(rows) + 1, device=rows.device)
        sets = torch.where(self.counts > 0, numbers, 0)
        keyed = torch.cat([rows[:, None].double(), self.settings, sets[:, None].double()], dim=1)
        if Truncation.of(self.settings).truncates:
            keyed = torch.cat([keyed, targets[:, None].double()], dim=1)
        pairs, places = torch.unique(keyed, dim=0, return_inverse=True)
        scores = at_least_float32(logits)[pairs[:, 0].long()]
        sampler = Truncation.of(pairs[:, 1:5])
        scores = scores / sampler.temperature[:, None].to(scores.dtype)
        recorded = pairs[:, 5] > 0
        if not sampler.truncates and not bool(recorded.any()):
            return scores, places
        left = torch.ones_like(scores, dtype=torch.bool)
        own = (~recorded).nonzero()[:, 0]
        if sampler.truncates and len(own):
            of_own = Truncation.of(pairs[own, 1:5])
            left[own] = of_own.kept(scores[own].detach(), pairs[own, 6].long())
        left[recorded] = False
        left[places.repeat_interleave(self.counts), self.ids] = True
        # Rounding may put a token at the set's edge outside of it here; the engine drew it.
        left[places, targets] = True
        return scores.masked_fill(~left, -torch.inf), places


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
