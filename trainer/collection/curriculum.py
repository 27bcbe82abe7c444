"""Curricula of a run: the choice of tasks, and a limit of calls that grows.

A group teaches by its differences, and ``G`` attempts that each succeed with ``p`` have a variance
of ``p (1 - p)``. With these weights, tasks are drawn most often where about half of the attempts
succeed. ``p`` is estimated from the run's own attempts with a uniform prior, ``(s + 1) / (n + 2)``,
so tasks without attempts weigh the most.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np


class TaskChoice:
    """A weighted random choice of a run's tasks, which ``keys`` name. It is thread-safe."""

    def __init__(self, keys: Sequence[str], seed: int, success: float = 1.0) -> None:
        self._places = {key: place for place, key in enumerate(keys)}
        self._seed = seed
        self._success = success
        self._attempts = np.zeros(len(keys))
        self._passed = np.zeros(len(keys))
        self._lock = threading.Lock()

    def learn(self, attempts: Iterable[tuple[str, float]]) -> None:
        """Count attempts, each given as the key of a task and the reward.

        Unknown keys are ignored.
        """
        with self._lock:
            for key, reward in attempts:
                if (place := self._places.get(key)) is not None:
                    self._attempts[place] += 1
                    self._passed[place] += reward >= self._success

    def weights(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return the weights of the tasks, ``float64[tasks]``.

        The weights are ``p (1 - p)`` of each task, scaled to sum to 1.
        """
        with self._lock:
            chance = (self._passed + 1) / (self._attempts + 2)
        spread = chance * (1 - chance)
        found: np.ndarray[tuple[int], np.dtype[np.float64]] = spread / spread.sum()
        return found

    def draw(self, number: int) -> int:
        """Return the index of the task of group ``number``."""
        weights = self.weights()
        return int(np.random.default_rng([self._seed, number]).choice(len(weights), p=weights))


def horizon(step: int, start: int, growth: int, every: int) -> int:
    """Return the number of calls that a session of ``step`` may make.

    It is ``start`` at first, and ``growth`` more after each ``every`` steps (ScalingInter-RL, arXiv
    2509.08755, section 3.3). Early sessions are short, which is easier to learn from; later ones
    may explore.
    """
    return start + growth * (step // every)
