"""A session's named rewards as the one number that its group is compared by."""

from __future__ import annotations

from collections.abc import Mapping

from bridle.reconstruct.rewards import VERIFIER_ALONE, Aggregation, Over
from bridle.reconstruct.samples.sample import Episode


def session_reward(
    episode: Episode,
    weights: Mapping[str, float] | None = None,
    turns: Over | None = None,
    sources: tuple[str, ...] = VERIFIER_ALONE,
) -> float | None:
    """Weighted sum of the session's rewards; ``None`` when there is none to sum.

    Of rewards with the same name the latest counts. ``turns`` says how rewards of single calls and
    turns become one of the session; without it they do not count. With ``weights`` every named
    reward must be there, without them all are added up as they are. Rewards of other ``sources``
    do not count.
    """
    return Aggregation(weights, turns, sources).value(episode.rewards)
