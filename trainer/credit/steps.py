"""Credit for single steps: by role, by equal states, by what came after.

``R`` is a session's number, ``R^p`` the return of the role ``p`` (see below), ``s_t`` the reward of
step ``t`` itself, ``T`` the last step, ``γ`` the discount and ``norm(x) = (x - mean) / (std +
1e-6)``:

================  ==========================================  ====================================
``per_role``      ``norm(R^p)`` over all steps of the step's  Dr. MAS, arXiv 2602.08847. A role that
                  role in the group                           acted in one session only has no
                                                              baseline: its tokens are masked.
``gigpo``         ``A^E + ω A^S``: ``A^E = norm(E)`` over     GiGPO, arXiv 2505.10978, equations 3,
                  the sessions, ``A^S = norm(G_t)`` over the  6 and 7: steps are compared at equal
                  steps at the same state                     states (:mod:`.anchors`); a step whose
                                                              state nobody shares has ``A^S = 0``.
``turn_returns``  ``norm(G_t)`` over all steps of the group   discounted returns of turns
================  ==========================================  ====================================

The rewards of an episode are those of the paper when ``reward_turns`` is not set, the default: step
``t`` has the reward ``r_t = s_t``, and the last one has the terminal reward besides,
``r_T = s_T + R``. So the episode's return is ``E = Σ_t r_t = R + Σ_t s_t``, without discount, and
the return of a step is ``G_t = Σ_{k >= t} γ^(k - t) r_k``. A session that has rewards of steps
alone has ``R = 0``. A branch's reward is one of the call that ends it, and a role's is one of the
role's last step. With ``reward_turns`` set, ``E`` is the session's number, which then has its
steps' rewards as that setting adds them; ``G_t`` is the same, so that no reward counts twice in it.

Steps follow each other along the session, also where a harness strips the model's reasoning and
every step is therefore a branch of its own. A call that trains nothing is a step of the return if
it has a reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.config import AtLeastZero, Share
from bridle.trainer.credit.anchors import anchors
from bridle.trainer.credit.group import (
    STD_EPSILON,
    Credit,
    CreditGroup,
    centred,
    normalized,
    register_advantage,
    stepwise,
)
from bridle.trainer.credit.rewards import calls_in_order


@register_advantage("per_role")
@stepwise
def per_role(group: CreditGroup) -> Credit:
    """Compare each role with itself, over its steps, by its own return."""
    places = dict.fromkeys((step.episode, step.role) for step in group.steps)
    own = {place: _role_return(group, *place) for place in places}
    rewards = np.asarray([own[step.episode, step.role] for step in group.steps], np.float64)
    roles = [step.role for step in group.steps]
    found = normalized(group, rewards, roles)
    for role in set(roles):
        acted = [index for index, other in enumerate(roles) if other == role]
        if len({group.steps[index].episode for index in acted}) < 2:
            found[acted] = np.nan
    return group.by_step(found)


def _role_return(group: CreditGroup, episode: int, role: str | None) -> float:
    """Return ``R^p`` of a session, or NaN without any reward."""
    whole, steps = group.given_to(episode, role), group.steps_reward(episode, role)
    if whole is None and not group.numbers[episode].parts_alone:
        whole = float(group.terminal[episode])
    given = [value for value in (whole, steps) if value is not None]
    return math.fsum(given) if given else math.nan


@dataclass(frozen=True, slots=True)
class ReturnOptions:
    discount: Share = 1.0
    """The discount γ of a step's return, per step. GiGPO's paper uses 0.95."""


@dataclass(frozen=True, slots=True)
class GigpoOptions(ReturnOptions):
    step_weight: AtLeastZero = 1.0
    """The weight ω of a step's own advantage."""


_RETURNS: Final = ReturnOptions()
_GIGPO: Final = GigpoOptions()


@register_advantage("gigpo")
@stepwise
def gigpo(group: CreditGroup, options: GigpoOptions = _GIGPO) -> Credit:
    """Add the session's advantage and the step's among steps at the same state."""
    whole = centred(group.totals) / (group.deviation(group.totals) + STD_EPSILON)
    episode = np.asarray([whole[step.episode] for step in group.steps], np.float64)
    step = normalized(group, returns(group, options.discount), anchors(group))
    return group.by_step(episode + options.step_weight * step)


@register_advantage("turn_returns")
@stepwise
def turn_returns(group: CreditGroup, options: ReturnOptions = _RETURNS) -> Credit:
    """Compare all steps of the group by their discounted returns."""
    values = returns(group, options.discount)
    return group.by_step(normalized(group, values, [None] * len(group.steps)))


def returns(group: CreditGroup, discount: float) -> NDArray[np.float64]:
    """Return the discounted return ``G_t`` of each step, ``float64[steps]``."""
    own = group.step_rewards
    found: dict[tuple[int, str], float] = {}
    for number, episode in enumerate(group.episodes):
        value = float(group.terminal[number])
        for later, call_id in enumerate(reversed(_steps_of(group, number, episode))):
            value = (value if later == 0 else discount * value) + own.get((number, call_id), 0.0)
            found[number, call_id] = value
    return np.asarray([found[step.episode, step.call_id] for step in group.steps], np.float64)


def rewards_in_order(
    group: CreditGroup, number: int, steps: Sequence[str], discount: float
) -> list[float]:
    """Return the reward ``r_t`` of each of a session's ``steps``, the terminal one with the last.

    A reward of a call that trains nothing counts in the step before it, discounted by the calls
    between them. Before the first step it counts in that one.
    """
    own, values = group.step_rewards, dict.fromkeys(steps, 0.0)
    calls = _steps_of(group, number, group.episodes[number])
    latest, distance = steps[0] if steps else None, 0
    begun = False
    for call_id in calls:
        distance += begun
        if call_id in values:
            latest, distance, begun = call_id, 0, True
        if latest is not None:
            values[latest] += discount**distance * own.get((number, call_id), 0.0)
    if latest is not None:
        values[latest] += discount**distance * float(group.terminal[number])
    return list(values.values())


def _steps_of(group: CreditGroup, number: int, episode: Episode) -> list[str]:
    """Return the calls of a session that its samples have or that have a reward.

    They are in the order in which they started.
    """
    given = group.numbers[number].calls
    known = {call_id for sample in episode.samples for call_id in sample.call_ids} | given.keys()
    return [call_id for call_id in calls_in_order(episode, list(given)) if call_id in known]
