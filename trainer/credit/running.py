"""A running baseline for each role: roles of one game need not be compared with their group.

``spiral``, role-conditioned advantage estimation of SPIRAL (arXiv 2506.24119, section 3.3): for the
role ``p`` in tasks of the suite ``G``, session by session,

    ``b_{G,p} <- α b_{G,p} + (1 - α) R_p``    ``A = R_p - b_{G,p}``

with ``b = 0`` at first. ``R_p`` is the sum of the rewards of the role's own calls if they have any,
else the role's own reward (:meth:`.group.CreditGroup.given_to`), else the session's number; a role
that has none of them is masked. The baselines live as long as the run: a checkpoint holds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from bridle.trainer.config import BelowOne
from bridle.trainer.credit.group import (
    Credit,
    CreditGroup,
    register_advantage,
    remembering,
    stepwise,
)


@dataclass(frozen=True, slots=True)
class SpiralOptions:
    decay: BelowOne = 0.95
    """The decay α: the fraction of a role's baseline that is kept with each session."""


_SPIRAL: Final = SpiralOptions()


@register_advantage("spiral")
@stepwise
@remembering
def spiral(group: CreditGroup, options: SpiralOptions = _SPIRAL) -> Credit:
    """Compare each role with the running mean of its rewards, which decays by ``α``."""
    decay = options.decay
    advantages: dict[tuple[int, str | None], float] = {}
    for step in group.steps:
        place = step.episode, step.role
        if place in advantages:
            continue
        reward = _reward(group, *place)
        if math.isnan(reward):
            advantages[place] = reward
            continue
        suite = group.episodes[step.episode].session.task_suite
        key = f"{suite or ''}|{step.role or ''}"
        baseline = decay * group.memory.get(key, 0.0) + (1 - decay) * reward
        group.memory[key] = baseline
        advantages[place] = reward - baseline
    return group.by_step(
        np.asarray([advantages[step.episode, step.role] for step in group.steps], np.float64)
    )


def _reward(group: CreditGroup, episode: int, role: str | None) -> float:
    """Return ``R_p`` of a session, or NaN without any."""
    for given in (group.steps_reward(episode, role), group.given_to(episode, role)):
        if given is not None:
            return given
    return math.nan if group.numbers[episode].parts_alone else float(group.rewards[episode])
