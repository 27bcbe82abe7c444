"""``truncated``: sessions whose last reply ended at the token limit.

DAPO's overlong filtering (arXiv 2503.14476, section 3.4): the loss of truncated samples is masked,
because a sound answer may be punished for its length alone.
"""

from __future__ import annotations

from bridle.reconstruct.samples.sample import Episode


def ended_by_itself(episode: Episode) -> bool:
    """Return whether the last reply is whole."""
    finished = [turn.finish_reason for turn in episode.turns if turn.finish_reason is not None]
    return not finished or finished[-1] != "length"
