"""The choice of the recorded call at which the siblings of a group leave the record.

A share of a step's groups are siblings: their sessions re-enter one earlier session at one of its
calls, and only what follows is sampled and trained. ``where`` says which call:

- ``random``: any call of any of the sessions
- ``failed``: any call of a session that failed
- ``entropy``: a call by its surprise, the mean of ``-logprob`` over its sampled tokens (ARPO,
  arXiv 2507.19849, branches where the entropy is high)
- ``value``: a call of a session whose group had different results, by the variance of a sibling's
  result for each call that the sibling has to sample

Siblings that all succeed, or all fail, teach nothing. The variance is ``V (1 - V)``, with ``V`` the
chance of success at the call: it is the mean of the session's group where the group began, and
moves evenly to the session's own result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Where = Literal["random", "failed", "entropy", "value"]


@dataclass(frozen=True, slots=True)
class EndedSession:
    """A recorded session that can be re-entered."""

    id: str
    success: bool
    group: float
    """The share of its group's sessions that succeeded."""

    def chance(self, passed: int, calls: int) -> float:
        """Return the chance of success after ``passed`` of the session's ``calls`` live calls."""
        return self.group + (self.success - self.group) * passed / calls


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """A recorded call at which a session can be re-entered."""

    call_id: str
    surprise: float
    """Mean of ``-logprob`` over the tokens that the call sampled, in nats."""
    chance: float
    """The chance that a sibling from here succeeds."""
    calls: int
    """Number of calls from here to the end of the session."""

    @property
    def worth(self) -> float:
        """The variance of a sibling's result, for each call of the sibling."""
        return self.chance * (1 - self.chance) / self.calls


def is_branch(number: int, share: float) -> bool:
    """Return whether group ``number`` is one of siblings.

    They are spread evenly, so that every step has its ``share`` of them.
    """
    return math.floor((number + 1) * share) > math.floor(number * share)


def in_order(
    sessions: Sequence[EndedSession], where: Where, rng: np.random.Generator
) -> list[EndedSession]:
    """Return the sessions that siblings may re-enter, in the order in which they are tried."""
    able = [one for one in sessions if not (where == "failed" and one.success)]
    drawn = [able[place] for place in rng.permutation(len(able))]
    if where == "value":
        drawn.sort(key=lambda one: one.group in (0, 1))
    return drawn


def chosen(
    points: Sequence[BranchPoint], where: Where, rng: np.random.Generator
) -> BranchPoint | None:
    """Return one of a session's points for the next siblings, or ``None`` if there is none."""
    if not points:
        return None
    weights = np.ones(len(points))
    if where == "entropy":
        weights = np.asarray([max(one.surprise, 1e-6) for one in points])
    if where == "value":
        weights = np.asarray([max(one.worth, 1e-6) for one in points])
    return points[int(rng.choice(len(points), p=weights / weights.sum()))]
