"""The choice of the recorded call at which the siblings of a group leave the record.

A share of a step's groups are siblings: their sessions re-enter one earlier session at one of its
calls, and only what follows is sampled and trained. ``where`` says which call:

- ``random``: any call of any of the sessions
- ``failed``: any call of a session that failed
- ``entropy``: a call by its surprise, the mean of ``-logprob`` over its sampled tokens (ARPO,
  arXiv 2507.19849, branches where the entropy is high)
- ``value``: the call whose chance of success is known least
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Where = Literal["random", "failed", "entropy", "value"]


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """A recorded call at which a session can be re-entered."""

    session_id: str
    call_id: str
    surprise: float
    """Mean of ``-logprob`` over the tokens that the call sampled, in nats."""
    success: bool
    """True if its session succeeded."""
    successes: int = 0
    """Number of siblings from here that succeeded."""
    siblings: int = 0

    @property
    def uncertainty(self) -> float:
        """The standard deviation of the chance of success, by a uniform prior and the siblings."""
        for_it = 1 + self.successes + self.success
        against = 3 + self.siblings - for_it
        whole = for_it + against
        return math.sqrt(for_it * against / (whole * whole * (whole + 1)))


def is_branch(number: int, share: float) -> bool:
    """Return whether group ``number`` is one of siblings.

    They are spread evenly, so that every step has its ``share`` of them.
    """
    return math.floor((number + 1) * share) > math.floor(number * share)


def chosen(
    points: Sequence[BranchPoint], where: Where, rng: np.random.Generator
) -> BranchPoint | None:
    """Return the point of the next siblings, or ``None`` if there is none."""
    able = points
    if where == "failed":
        able = [one for one in points if not one.success]
    if not able:
        return None
    if where == "value":
        most = max(one.uncertainty for one in able)
        able = [one for one in able if one.uncertainty == most]
    weights = np.ones(len(able))
    if where == "entropy":
        weights = np.asarray([max(one.surprise, 1e-6) for one in able])
    return able[int(rng.choice(len(able), p=weights / weights.sum()))]
