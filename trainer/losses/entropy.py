"""An entropy bonus that is on while the policy's entropy is below a floor.

It is the adaptive control of Skywork-OR1 (arXiv 2505.22312, section 4.2.2). With ``H`` the mean
entropy of the trained tokens in the last step that had an update, ``F`` the floor and ``Δ`` the
step, the coefficient of the next step is

- ``c = max(0, c + Δ)`` if ``H < F``, and ``max(0, c - Δ)`` otherwise;
- the loss gets ``-c Σ w H`` if ``H < F``, and nothing otherwise, where ``w`` are the weights of
  :mod:`bridle.trainer.credit.weighting`.

The paper takes the entropy before a step's update, which this control would have to compute in a
pass of its own. Here it is the one that the previous update measured, so the bonus comes one step
later.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

from bridle.trainer.config import LossConfig

_COEFFICIENT: Final = "entropy/coefficient"
_LAST: Final = "entropy/last"


def bonus_of(memory: MutableMapping[str, float], config: LossConfig) -> float:
    """Return the coefficient of this step's bonus, from what :func:`observe` has kept."""
    if memory.get(_LAST, config.entropy_floor) >= config.entropy_floor:
        return 0.0
    return memory[_COEFFICIENT]


def observe(memory: MutableMapping[str, float], entropy: float, config: LossConfig) -> None:
    """Keep the mean entropy of a step in ``memory``, and move the coefficient."""
    if not config.entropy_floor:
        return
    towards = config.entropy_step if entropy < config.entropy_floor else -config.entropy_step
    memory[_LAST] = entropy
    memory[_COEFFICIENT] = max(0.0, memory.get(_COEFFICIENT, 0.0) + towards)
