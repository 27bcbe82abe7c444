"""Credit for single steps: by role, by equal states, by what came after.

``R`` is a session's reward, ``s_t`` what was given to its step ``t`` itself, ``T`` its last step,
``γ`` the discount and ``norm(x) = (x - mean) / (std + 1e-6)``:

================  ==========================================  ====================================
``per_role``      ``norm(R)`` over all steps of the step's    Dr. MAS, arXiv 2602.08847. A role that
                  role in the group                           acted in one session only has no
                                                              baseline: its tokens are masked.
``gigpo``         ``norm(R)`` over the sessions, and          GiGPO, arXiv 2505.10978: anchors are
                  ``+ ω norm(G_t)`` over the steps with       equal prompts within the group; a step
                  the same prompt                             whose prompt nobody shares adds 0.
``turn_returns``  ``norm(G_t)`` over all steps of the group   discounted returns of turns
================  ==========================================  ====================================

with ``G_t = Σ_{k >= t} γ^(k - t) s_k + γ^(T - t) R`` along the session: where a harness strips what
the model thought, every step is a branch of its own, and they follow each other all the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.credit.group import (
    STD_EPSILON,
    Credit,
    CreditGroup,
    centred,
    register_advantage,
)


@register_advantage("per_role")
def per_role(group: CreditGroup) -> Credit:
    """Each role compared with itself, over its steps."""
    rewards = np.asarray([group.rewards[step.episode] for step in group.steps], np.float64)
    roles = [step.role for step in group.steps]
    found = _normalized(group, rewards, roles)
    for role in set(roles):
        own = [index for index, other in enumerate(roles) if other == role]
        if len({group.steps[index].episode for index in own}) < 2:
            found[own] = np.nan
    return group.by_step(found)


@register_advantage("gigpo")
def gigpo(group: CreditGroup) -> Credit:
    """The session's advantage, and the step's among those that were asked the same."""
    whole = centred(group.rewards) / (group.deviation(group.rewards) + STD_EPSILON)
    episode = np.asarray([whole[step.episode] for step in group.steps], np.float64)
    step = _normalized(group, returns(group), [step.prompt for step in group.steps])
    return group.by_step(episode + group.config.step_weight * step)


@register_advantage("turn_returns")
def turn_returns(group: CreditGroup) -> Credit:
    """Each step by what came of it."""
    return group.by_step(_normalized(group, returns(group), [None] * len(group.steps)))


def returns(group: CreditGroup) -> NDArray[np.float64]:
    """``float64[steps]``: the discounted return ``G_t`` of each step."""
    discount, own = group.config.discount, group.call_rewards
    found: dict[tuple[int, str], float] = {}
    for number, episode in enumerate(group.episodes):
        value = float(group.rewards[number])
        for later, call_id in enumerate(reversed(_calls_in_order(episode))):
            value = (value if later == 0 else discount * value) + own.get((number, call_id), 0.0)
            found[number, call_id] = value
    return np.asarray([found[step.episode, step.call_id] for step in group.steps], np.float64)


def _calls_in_order(episode: Episode) -> list[str]:
    """A session's calls as they started, on whichever branch; as its samples have them, where their
    start is not known."""
    seen = dict.fromkeys(call_id for sample in episode.samples for call_id in sample.call_ids)
    started = {turn.call_id: place for place, turn in enumerate(episode.turns)}
    return sorted(seen, key=lambda call_id: started.get(call_id, len(started)))


def _normalized(
    group: CreditGroup, values: NDArray[np.float64], anchors: Sequence[Hashable]
) -> NDArray[np.float64]:
    """``values`` normalised among those of the same anchor; 0 for one that stands alone."""
    members: dict[Hashable, list[int]] = {}
    for index, anchor in enumerate(anchors):
        members.setdefault(anchor, []).append(index)
    found = np.zeros_like(values)
    for indices in members.values():
        own = values[indices]
        found[indices] = centred(own) / (group.deviation(own) + STD_EPSILON)
    return found
