"""GRPO-RoC: half of a group twice as large as wanted is kept (rStar2-Agent, arXiv 2508.20722).

Sessions that failed are kept at random, so that they stay as varied as they were. Those that
succeeded are drawn with weights ``1 / (p + 0.01)``, where ``p`` is the share of a session's tool
calls that could not be read, or 0.5 if it has none: a success full of faulty calls is not
what the policy should learn. The paper adds a penalty for the form of its answer tags, which an
agent here need not have; the 0.01, which the paper leaves open, stands for a penalty of nothing.

A session has succeeded when its reward is above the middle between the group's lowest and highest.
The choice is made before the baseline, and is the same for the same sessions.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Episode

_NO_CALL: Final = 0.5
_FLOOR: Final = 0.01


def call_penalty(episode: Episode) -> float:
    """Return the share of tool calls that could not be read, or 0.5 if there are none."""
    acting = [turn for turn in episode.turns if turn.tool_calls or turn.parse_failed]
    if not acting:
        return _NO_CALL
    return sum(turn.parse_failed for turn in acting) / len(acting)


def kept_on_correct(
    episodes: Sequence[Episode], rewards: NDArray[np.float64], seed: int
) -> NDArray[np.bool_]:
    """Return which sessions of a group are kept, ``bool[G]``.

    They are half of those that succeeded and half of those that did not, at least one of each.
    """
    if rewards.min() == rewards.max():
        succeeded = np.full(len(rewards), rewards.max() > 0)
    else:
        succeeded = rewards > (rewards.min() + rewards.max()) / 2
    names = ",".join(sorted(episode.session.id for episode in episodes))
    draw = np.random.default_rng([seed, zlib.crc32(names.encode())])
    penalties = np.asarray([call_penalty(episode) for episode in episodes])
    kept = np.zeros(len(episodes), np.bool_)
    for chosen, weights in (
        (np.flatnonzero(succeeded), 1 / (penalties + _FLOOR)),
        (np.flatnonzero(~succeeded), np.ones(len(episodes))),
    ):
        if len(chosen):
            share = weights[chosen] / weights[chosen].sum()
            kept[draw.choice(chosen, max(1, len(chosen) // 2), replace=False, p=share)] = True
    return kept
