"""The rewards of a session as the trainer's configuration counts them."""

from __future__ import annotations

from collections.abc import Sequence

from bridle.reconstruct.rewards import Aggregation, Numbers
from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.config import AdvantageConfig


def aggregation(stated: AdvantageConfig) -> Aggregation:
    """How a run with these settings makes numbers of rewards."""
    return Aggregation(stated.reward_weights, stated.reward_turns, stated.reward_sources)


def numbers_of(episode: Episode, stated: AdvantageConfig) -> Numbers:
    """The numbers of a session at each place."""
    return aggregation(stated).numbers(episode.rewards, calls_in_order(episode))


def calls_in_order(episode: Episode, others: Sequence[str] = ()) -> list[str]:
    """The ids of a session's calls as they started, and of ``others``: those that only its samples
    have stand in the samples' order behind the others."""
    sampled = (call_id for sample in episode.samples for call_id in sample.call_ids)
    return list(dict.fromkeys([*(turn.call_id for turn in episode.turns), *sampled, *others]))
