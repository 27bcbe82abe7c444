"""The rewards of a session as the trainer's configuration counts them."""

from __future__ import annotations

from collections.abc import Sequence

from bridle.reconstruct.rewards import Aggregation, Numbers
from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.config import AdvantageConfig


def aggregation(stated: AdvantageConfig) -> Aggregation:
    """Return the rule by which a run with these settings turns rewards into numbers."""
    return Aggregation(stated.reward_weights, stated.reward_turns, stated.reward_sources)


def numbers_of(episode: Episode, stated: AdvantageConfig) -> Numbers:
    """Return the numbers that the rewards of a session and of its calls come to."""
    return aggregation(stated).numbers(episode.rewards)


def calls_in_order(episode: Episode, others: Sequence[str] = ()) -> list[str]:
    """Return the ids of a session's calls in the order in which they started.

    Behind them stand the calls that only its samples have, in the samples' order, and then
    ``others``.
    """
    sampled = (call_id for sample in episode.samples for call_id in sample.call_ids)
    return list(dict.fromkeys([*(turn.call_id for turn in episode.turns), *sampled, *others]))
