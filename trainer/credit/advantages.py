"""How much better a session did than its group: outcome advantages.

For a group of ``G`` rewards ``r``:

=================  ============================================  =================================
``grpo``           ``(r_i - mean(r)) / (std(r) + 1e-6)``         DeepSeekMath, arXiv 2402.03300
``leave_one_out``  ``r_i - mean(r without r_i)``                 RLOO, arXiv 2402.14740
``mean``           ``r_i - mean(r)``                             Dr. GRPO, arXiv 2503.20783
=================  ============================================  =================================

``std`` is the sample standard deviation (``G - 1``). The baseline is taken over the whole group,
before any filter. A group whose rewards are all equal, and a group of one, gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from bridle.trainer.registry import Registry

STD_EPSILON = 1e-6

Advantage = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""From the rewards ``float64[G]`` of a group, at least two and not all equal, to its advantages
``float64[G]``."""

ADVANTAGES: Registry[Advantage] = Registry("advantage")


def register_advantage(name: str) -> Callable[[Advantage], Advantage]:
    """A decorator that makes a function the advantage that configurations name ``name``."""
    return ADVANTAGES.register(name)


@register_advantage("grpo")
def standardized(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance from the mean in standard deviations."""
    return mean_centred(rewards) / (float(rewards.std(ddof=1)) + STD_EPSILON)


@register_advantage("leave_one_out")
def leave_one_out(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance from the mean of the others: ``(r_i - mean) * G / (G - 1)``."""
    return mean_centred(rewards) * (len(rewards) / (len(rewards) - 1))


@register_advantage("mean")
def mean_centred(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance from the mean."""
    centred: NDArray[np.float64] = rewards - rewards.mean()
    return centred


def group_advantages(rewards: NDArray[np.float64], baseline: str) -> NDArray[np.float64]:
    """Advantages ``float64[G]`` of one group's rewards ``float64[G]``."""
    if is_degenerate(rewards):
        return np.zeros_like(rewards)
    return ADVANTAGES.find(baseline)(rewards)


def is_degenerate(rewards: NDArray[np.float64]) -> bool:
    """Whether the group has nothing to compare: fewer than two rewards, or all of them equal."""
    if len(rewards) < 2:
        return True
    spread = float(rewards.max() - rewards.min())
    return spread <= 1e-9 * max(1.0, float(np.abs(rewards).max()))


def advantages_by_group(
    rewards: Sequence[float], groups: Sequence[Hashable], baseline: str
) -> NDArray[np.float64]:
    """Advantages ``float64[S]`` of ``S`` sessions, each compared within its own group.

    For per-role normalisation (Dr. MAS, arXiv 2602.08847) pass one entry per session and role, with
    ``(group, role)`` as its group.
    """
    values = np.asarray(rewards, dtype=np.float64)
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = np.zeros_like(values)
    for indices in members.values():
        advantages[indices] = group_advantages(values[indices], baseline)
    return advantages
