"""``failed_calls``: sessions in which the engine or the proxy failed a call.

An agent that received an error did something else than it would have done. Sessions whose
*outcome* is infrastructure leave in any case (``filters.outcomes``); this filter also finds those
that went on. Calls refused for a budget or for their length are the agent's own.
"""

from __future__ import annotations

from typing import Final

from bridle.reconstruct.samples.sample import Episode
from bridle.store.records import AGENTS_OWN, CallStatus

_FAULTS: Final = frozenset(
    {CallStatus.FAILED, CallStatus.INTERRUPTED, CallStatus.QUARANTINED, CallStatus.OPEN}
)


def every_call_answered(episode: Episode) -> bool:
    """Return whether no call failed for a reason that is not the agent's."""
    return not any(
        turn.status in _FAULTS and turn.reason not in AGENTS_OWN for turn in episode.turns
    )
