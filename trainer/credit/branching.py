"""Credit from siblings, the sessions that re-enter one recorded session at one of its calls.

``R`` is a session's number, and ``V(c)`` the mean number of the sessions that go on from the call
``c``: the siblings that branch there, and the session that has the call itself.

================  ======================================================================
``siblings``      ``(R - V) / (std + 1e-6)``, with ``V`` the mean of the other sessions of the
                  group: they all begin at one branch point, so ``V`` is the value there without
                  bias.
``turn_values``   ``V(c') - V(c)`` for the steps from one branch point ``c`` of a session up to
                  its next one ``c'``; the first is the group's mean, the last the session's own
                  ``R``. VinePPO, arXiv 2410.01679, with values at some steps only.
================  ======================================================================

Only sessions of the same training step are compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.config import AdvantageConfig
from bridle.trainer.credit.group import STD_EPSILON, Credit, CreditGroup, register_advantage
from bridle.trainer.credit.rewards import calls_in_order, numbers_of


@register_advantage("siblings")
def siblings(group: CreditGroup) -> Credit:
    """Compare each session with the others that begin at the same branch point."""
    deviation = group.deviation(group.rewards) + STD_EPSILON
    return group.everywhere(_from_others(group.rewards) / deviation)


@register_advantage("turn_values")
def turn_values(group: CreditGroup) -> Credit:
    """Give each step the change of the value over it, or over the steps up to the next value."""
    begins = group.rewards - _from_others(group.rewards)
    branches = _branches(group)
    changes = np.zeros(len(group.steps))
    places = {(step.episode, step.call_id): place for place, step in enumerate(group.steps)}
    for number, episode in enumerate(group.episodes):
        own = float(group.rewards[number])
        steps = [one.call_id for one in group.steps_of(number)]
        values = _values(episode, own, branches)
        # The value before each step, where it is known, and the session's own number at the end.
        known = [float(begins[number]), *(values.get(call) for call in steps[1:]), own]
        for at, call in enumerate(steps):
            before = next(one for one in reversed(known[: at + 1]) if one is not None)
            after = next(one for one in known[at + 1 :] if one is not None)
            changes[places[number, call]] = after - before
    return group.by_step(changes)


def _from_others(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distance of each reward from the mean of the others; 0 for a single one."""
    if len(rewards) < 2:
        return np.zeros_like(rewards)
    found: NDArray[np.float64] = (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)
    return found


def _branches(group: CreditGroup) -> Mapping[str, list[float]]:
    """Return the numbers of the step's siblings, by the call at which they branch."""
    found: dict[str, list[float]] = {}
    for episode in group.batch or group.episodes:
        call = episode.session.origin_call_id
        value = _number(episode, group.config)
        if call is not None and value is not None:
            found.setdefault(call, []).append(value)
    return found


def _values(episode: Episode, own: float, branches: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the value before each call of a session that others branch at."""
    return {
        call: float(np.mean([own, *branches[call]]))
        for call in calls_in_order(episode)
        if call in branches
    }


def _number(episode: Episode, config: AdvantageConfig) -> float | None:
    return numbers_of(episode, config).value
