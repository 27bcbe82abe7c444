"""Policy versions of an attempt that ended between publishing and its checkpoint.

A version stands for one set of weights, so weights that are resumed from a checkpoint may need a
new number. Tokens of earlier attempts keep their recorded versions in the store; here they are
mapped to the numbers that the present attempt counts by, so that staleness stays a number of
updates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Episode


@dataclass(frozen=True, slots=True)
class Renumbering:
    """Every change of numbers in a run, oldest first."""

    changes: tuple[tuple[int, int], ...] = ()
    """Pairs ``(first, shift)``: versions recorded below ``first`` count as ``shift`` more."""

    def resumed(self, version: int, new: int) -> Renumbering:
        """Return the value after weights that were ``version`` are published as ``new``."""
        return Renumbering((*self.changes, (new, new - version)))

    def versions(self, recorded: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return recorded versions (-1 if not sampled) in the numbers of the present attempt."""
        found = recorded.copy()
        for first, shift in self.changes:
            found[(recorded >= 0) & (recorded < first)] += shift
        return found

    def episode(self, recorded: Episode) -> Episode:
        """Return ``recorded`` with its samples' versions in the numbers of the present attempt."""
        if not self.changes:
            return recorded
        samples = tuple(
            replace(sample, versions=self.versions(sample.versions)) for sample in recorded.samples
        )
        return replace(recorded, samples=samples)
