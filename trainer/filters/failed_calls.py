"""``failed_calls``: sessions in which the engine or the proxy failed a call.

An agent that was answered by an error did something else than it would have done. Sessions whose
*outcome* is infrastructure leave in any case (``filters.outcomes``); this filter also finds those
that went on. Calls refused for a budget or for their length are the agent's own.
"""

from __future__ import annotations

from bridle.reconstruct.samples.sample import Episode
from bridle.store.records import AGENTS_OWN, UNANSWERED
from bridle.trainer.filters.registry import register_filter


@register_filter("failed_calls")
def every_call_answered(episode: Episode) -> bool:
    """Whether no call failed for a reason that is not the agent's."""
    return not any(
        turn.status in UNANSWERED and turn.reason not in AGENTS_OWN for turn in episode.turns
    )
