"""A session's named rewards as the one number that its group is compared by."""

from __future__ import annotations

from collections.abc import Mapping

from reconstruct.rewards import Aggregation
from reconstruct.samples import Episode


def session_reward(episode: Episode, weights: Mapping[str, float] | None = None) -> float | None:
    """Weighted sum of the session's rewards; ``None`` when there is none to sum.

    Of rewards with the same name the latest counts; rewards of single calls or turns do not. With
    ``weights`` every named reward must be there, without them all are added up as they are.
    """
    return Aggregation(weights).value(episode.rewards)
