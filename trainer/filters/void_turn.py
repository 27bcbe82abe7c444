"""``void_turn``: sessions with a turn that neither acts nor answers (SimpleTIR, arXiv 2509.02479).

Such a turn has no complete tool call and no text: the policy has drifted, or ended early. Training
on it, or on the turns after it, makes multi-turn training collapse; the paper leaves the whole
trajectory out of the loss.
"""

from __future__ import annotations

from bridle.reconstruct.samples.sample import Episode, Turn
from bridle.store.records import CallStatus


def no_void_turn(episode: Episode) -> bool:
    """Return whether every turn that the engine completed acts or answers."""
    return not any(map(is_void, episode.turns))


def is_void(turn: Turn) -> bool:
    if turn.status is not CallStatus.COMPLETE:
        return False
    acts = turn.tool_calls > 0 and not turn.parse_failed
    answers = turn.has_text and not turn.parse_failed
    return not (acts or answers)
