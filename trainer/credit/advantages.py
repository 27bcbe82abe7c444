"""Advantages of whole sessions within their group: one number for all tokens of a session.

For a group of ``G`` rewards ``r``:

=================  ============================================  =================================
``grpo``           ``(r_i - mean(r)) / (std(r) + 1e-6)``         DeepSeekMath, arXiv 2402.03300
``leave_one_out``  ``r_i - mean(r without r_i)``                 RLOO, arXiv 2402.14740
``mean``           ``r_i - mean(r)``                             Dr. GRPO, arXiv 2503.20783
``lite_ppo``       ``(r_i - mean(r)) / (std(r_B) + 1e-6)``;      Lite PPO, arXiv 2508.08221, with
                   ``r_B``: all sessions of the step             ``loss.weighting = "token"``
``gated``          ``grpo`` of ``r_i + [r_i >= gate] Σ s_i``     G-RA, arXiv 2508.10548; ``s_i``:
                                                                 the rewards of its calls, which
                                                                 are not in ``r_i``
``none``           ``0``                                         none: a teacher's part alone
                                                                 (:mod:`.distillation`)
=================  ============================================  =================================

``std`` is that of the sample (``G - 1``) or of the population (``G``), by ``deviation``. The
baseline is taken over the whole group, before any filter. A group whose rewards are all equal, and
a group of one, gives zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bridle.trainer.credit.group import (
    STD_EPSILON,
    Credit,
    CreditGroup,
    centred,
    register_advantage,
)
from bridle.trainer.credit.rewards import numbers_of


@register_advantage("grpo")
def standardized(group: CreditGroup) -> Credit:
    """Return the distance from the mean in standard deviations."""
    return group.everywhere(_standardized(group, group.rewards))


@register_advantage("leave_one_out")
def leave_one_out(group: CreditGroup) -> Credit:
    """Return the distance from the mean of the others: ``(r_i - mean) * G / (G - 1)``."""
    size = len(group.rewards)
    return group.everywhere(group.centred * (size / max(size - 1, 1)))


@register_advantage("mean")
def mean_centred(group: CreditGroup) -> Credit:
    """Return the distance from the mean."""
    return group.everywhere(group.centred)


@register_advantage("lite_ppo")
def lite_ppo(group: CreditGroup) -> Credit:
    """Return the distance from the group's mean in standard deviations of the whole step.

    The deviation is that of all sessions with a reward, those of other groups included.
    """
    given = [numbers_of(episode, group.config).value for episode in group.batch]
    step = np.asarray([value for value in given if value is not None], np.float64)
    deviation = group.deviation(step if len(step) else group.rewards)
    return group.everywhere(group.centred / (deviation + STD_EPSILON))


@dataclass(frozen=True, slots=True)
class GatedOptions:
    gate: float = 1.0
    """The threshold: rewards of steps count only in sessions whose own reward is at least this."""


_GATED: Final = GatedOptions()


@register_advantage("gated")
def gated(group: CreditGroup, options: GatedOptions = _GATED) -> Credit:
    """Add step rewards where the session's own reward has passed the gate, then standardize."""
    totals = group.terminal.copy()
    for (episode, _), value in group.step_rewards.items():
        if group.terminal[episode] >= options.gate:
            totals[episode] += value
    return group.everywhere(_standardized(group, totals))


@register_advantage("none")
def none(group: CreditGroup) -> Credit:
    """Return zeros, because rewards do not count."""
    return group.everywhere(np.zeros(len(group.rewards)))


def _standardized(group: CreditGroup, values: NDArray[np.float64]) -> NDArray[np.float64]:
    distance: NDArray[np.float64] = centred(values) / (group.deviation(values) + STD_EPSILON)
    return distance
