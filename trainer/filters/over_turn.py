"""``over_turn``: sessions that ran out of turns, tokens, time or context.

The rewards of such sessions are low because they were cut, not because of what they did. The
over-turn masking of Mini-o3 (arXiv 2509.07969) masks them, so that long attempts are not punished:
``A' = M A`` with ``M = 0`` for an incomplete response, the baseline taken over all of the group,
and the loss a mean over the rest.
"""

from __future__ import annotations

from typing import Final

from bridle.reconstruct.samples.sample import Episode
from bridle.store.records import CallStatus

_CUT: Final = frozenset({"budget", "context_overflow"})


def within_its_turns(episode: Episode) -> bool:
    """Return whether no budget and no context ended the session."""
    if episode.session.outcome == "timeout":
        return False
    return not any(
        turn.status is CallStatus.FAILED and turn.reason in _CUT for turn in episode.turns
    )
