"""When sessions are collected: in turn with training, or ahead of it by so many steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from bridle.reconstruct.samples.sample import Episode


class Collect(Protocol):
    def __call__(self, step: int, version: int) -> Sequence[Episode]:
        """Run the sessions of ``step``; ``version`` is what the engine serves at the start."""


class Collector:
    """Hands over the sessions of each step, in order.

    With ``ahead = 0`` each step is collected when it is asked for, in the caller's thread: every
    session is of the present version. With ``ahead = n`` a thread collects up to ``n`` steps in
    advance, one after another, so that the engine works while the trainer does; a session then lags
    at most ``n`` versions behind when it is trained on.
    """

    def __init__(
        self, collect: Collect, *, ahead: int, steps: int, version: Callable[[], int]
    ) -> None:
        """``steps``: none from there on is collected. ``version``: the one served now."""
        self._collect = collect
        self._ahead = ahead
        self._steps = steps
        self._version = version
        self._pending: dict[int, Future[Sequence[Episode]]] = {}
        self._pool = ThreadPoolExecutor(1, "collect") if ahead else None

    def take(self, step: int) -> Sequence[Episode]:
        """The sessions of ``step``; what collecting raised is raised here."""
        if self._pool is None:
            return self._collect(step, self._version())
        for number in range(step, min(step + self._ahead + 1, self._steps)):
            if number not in self._pending:
                self._pending[number] = self._pool.submit(self._run, number)
        return self._pending.pop(step).result()

    def _run(self, step: int) -> Sequence[Episode]:
        return self._collect(step, self._version())

    def close(self) -> None:
        """Collections that have not begun are cancelled; one that runs is not waited for."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
