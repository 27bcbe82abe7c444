"""A session's rewards by name: of several values the latest counts."""

from __future__ import annotations

from collections.abc import Iterable

from store.records import Reward


def session_rewards(rewards: Iterable[Reward]) -> dict[str, float]:
    """The latest value of each name given to the session as a whole, float64.

    Rewards of single calls or turns are left out: how they add up is for a run to state.
    """
    whole = [r for r in rewards if r.call_id is None and r.turn is None]
    return {r.name: r.value for r in sorted(whole, key=lambda r: r.created_at)}
