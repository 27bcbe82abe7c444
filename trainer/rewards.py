"""A session's named rewards as the one number that its group is compared by."""

from __future__ import annotations

from collections.abc import Mapping

from reconstruct.samples import Episode


def session_reward(episode: Episode, weights: Mapping[str, float] | None = None) -> float | None:
    """Weighted sum of the session's rewards; ``None`` when there is none to sum.

    Of rewards with the same name the latest counts; rewards of single calls or turns do not. With
    ``weights`` every named reward must be there, without them all are added up as they are.
    """
    ordered = sorted(episode.rewards, key=lambda reward: reward.created_at)
    latest = {
        reward.name: reward.value
        for reward in ordered
        if reward.call_id is None and reward.turn is None
    }
    if weights is None:
        return sum(latest.values()) if latest else None
    if any(name not in latest for name in weights):
        return None
    return sum(factor * latest[name] for name, factor in weights.items())
