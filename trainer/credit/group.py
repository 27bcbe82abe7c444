"""What an estimator sees: the sessions of one group, their rewards, and the steps within them.

An estimator is a function from a :class:`CreditGroup` to the credit of every token. A *step* is a
call of a session of which a token is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Episode, Sample
from bridle.trainer.config import AdvantageConfig
from bridle.trainer.registry import Registry

STD_EPSILON: Final = 1e-6

Credit = list[list[NDArray[np.float32]]]
"""By episode and sample, ``float32[T]``. NaN: the token has nothing to be compared with, and is
masked as ``no_baseline``."""


@dataclass(frozen=True, slots=True)
class CreditStep:
    """A call of a session of which a token is trained."""

    episode: int
    """Index in the group."""
    call_id: str
    role: str | None
    prompt: bytes
    """The ids before its first token: equal for equal prompts."""


@dataclass(frozen=True)
class CreditGroup:
    """Sessions that are compared with each other."""

    episodes: Sequence[Episode]
    rewards: NDArray[np.float64]
    """``float64[G]``, one for each session."""
    config: AdvantageConfig
    memory: dict[str, float] = field(default_factory=dict)
    """What an estimator keeps from group to group of a run, by a key of its own."""

    @cached_property
    def centred(self) -> NDArray[np.float64]:
        """``float64[G]``: distance of each reward from the group's mean; exact zeros where there is
        nothing to compare."""
        return centred(self.rewards)

    def deviation(self, values: NDArray[np.float64]) -> float:
        """The standard deviation, of the sample or the population as configured; 0 for one
        value."""
        if len(values) < 2:
            return 0.0
        return float(values.std(ddof=1 if self.config.deviation == "sample" else 0))

    @cached_property
    def steps(self) -> tuple[CreditStep, ...]:
        """The steps of all sessions, in the order of their first appearance."""
        found: dict[tuple[int, str], CreditStep] = {}
        for number, episode in enumerate(self.episodes):
            for sample in episode.samples:
                for place, call_id in enumerate(sample.call_ids):
                    here = np.flatnonzero(sample.calls == place)
                    trained = len(here) > 0 and bool(sample.mask[here].any())
                    if trained and (number, call_id) not in found:
                        prompt = sample.token_ids[: here[0]].tobytes()
                        role = role_of(sample, place)
                        found[number, call_id] = CreditStep(number, call_id, role, prompt)
        return tuple(found.values())

    def everywhere(self, advantages: NDArray[np.float64]) -> Credit:
        """The same credit for every token of a session; ``advantages`` is ``float64[G]``."""
        return [
            [np.full(len(sample.token_ids), value, np.float32) for sample in episode.samples]
            for episode, value in zip(self.episodes, advantages.tolist(), strict=True)
        ]

    def by_step(self, advantages: NDArray[np.float64]) -> Credit:
        """The same credit for every token of a step; ``advantages`` has one for each of
        ``steps``."""
        values = {
            (step.episode, step.call_id): value
            for step, value in zip(self.steps, advantages.tolist(), strict=True)
        }
        return [
            [_of_calls(sample, number, values) for sample in episode.samples]
            for number, episode in enumerate(self.episodes)
        ]

    @cached_property
    def call_rewards(self) -> dict[tuple[int, str], float]:
        """By episode and call, the sum of the rewards that were given to the call itself; of
        several with one name the latest."""
        latest: dict[tuple[int, str], dict[str, float]] = {}
        for number, episode in enumerate(self.episodes):
            for reward in sorted(episode.rewards, key=lambda one: one.created_at):
                if reward.call_id is not None:
                    latest.setdefault((number, reward.call_id), {})[reward.name] = reward.value
        return {key: sum(values.values()) for key, values in latest.items()}


def role_of(sample: Sample, place: int) -> str | None:
    """The role of one of a sample's calls."""
    return sample.roles[place] if sample.roles else sample.role


def _of_calls(
    sample: Sample, number: int, values: dict[tuple[int, str], float]
) -> NDArray[np.float32]:
    credit = np.zeros(len(sample.token_ids), np.float32)
    for place, call_id in enumerate(sample.call_ids):
        credit[sample.calls == place] = values.get((number, call_id), 0.0)
    return credit


def centred(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance from the mean; exact zeros for fewer than two values, and for equal ones."""
    if len(values) < 2:
        return np.zeros_like(values)
    spread = float(values.max() - values.min())
    if spread <= 1e-9 * max(1.0, float(np.abs(values).max())):
        return np.zeros_like(values)
    distance: NDArray[np.float64] = values - values.mean()
    return distance


Advantage = Callable[[CreditGroup], Credit]

ADVANTAGES: Registry[Advantage] = Registry("advantage")


def register_advantage(name: str) -> Callable[[Advantage], Advantage]:
    """A decorator that makes a function the advantage that configurations name ``name``."""
    return ADVANTAGES.register(name)
