"""The output of a training run at work: its beginning, and the sessions of the current step."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Mapping

from bridle.diagnosis.findings import CollapseWatch
from bridle.diagnosis.transcript import lasted
from bridle.run.local import TrainingBegin
from bridle.store.reading.queries import Reader

LINE_EVERY_S = 15.0
"""The least number of seconds between two lines about sessions."""


class TrainingProgress:
    """The progress of a run.

    It prints where the run is recorded, and then how many sessions of the step have ended, with
    their mean reward and the time that is left. A step that shows a collapse of the policy prints a
    warning, once for each kind. Sessions end in another thread than steps.
    """

    def __init__(
        self,
        steps: int,
        print_line: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        every_s: float = LINE_EVERY_S,
    ) -> None:
        self._steps = steps
        self._print_line = print_line
        self._clock = clock
        self._every_s = every_s
        self._lock = threading.Lock()
        self._per_step = 0
        self._step = 0
        self._ended = 0
        self._rewards: list[float] = []
        self._began = self._printed = self._run_began = clock()
        self._trained = 0
        self._watch = CollapseWatch()

    def begin(self, begin: TrainingBegin) -> None:
        self._per_step, self._step = begin.sessions_per_step, begin.step
        goes_on = f", goes on after step {begin.step}" if begin.step else ""
        if begin.step:
            with Reader(begin.store) as reader:
                self._watch.resume(reader.metrics(begin.run_id), begin.step)
        self._print_line(f"run {begin.run_id}, recorded to {begin.store}{goes_on}")
        self._print_line(f"look at it with: bridle viewer --store {shlex.quote(begin.store)}")
        starts = "engine and proxy start; then " if begin.starts_services else ""
        self._print_line(
            f"{starts}{self._steps - begin.step} steps of {begin.sessions_per_step} sessions"
        )

    def session_ended(self, reward: float | None) -> None:
        with self._lock:
            self._ended += 1
            if reward is not None:
                self._rewards.append(reward)
            now = self._clock()
            if now - self._printed < self._every_s:
                return
            self._printed = now
            line = self._line(now)
        self._print_line(line)

    def step_ended(self, step: int, numbers: Mapping[str, float]) -> None:
        """Look at the numbers of a step, print the time that is left, and begin the next.

        Sessions that end from now on count for the next step.
        """
        for finding in self._watch.add(step, numbers):
            name, cause = finding.name, finding.cause
            self._print_line(f"warning: {name}: {cause}. {finding.evidence} {finding.remedy}")
        with self._lock:
            self._step += 1
            self._ended = 0
            self._rewards.clear()
            self._began = self._printed = self._clock()
            self._trained += 1
            spent, left = self._began - self._run_began, self._steps - self._step
        if left > 0:
            estimate = lasted(left * spent / self._trained)
            self._print_line(f"about {estimate} left for the rest of {self._steps} steps")

    def _line(self, now: float) -> str:
        mean = sum(self._rewards) / len(self._rewards) if self._rewards else None
        reward = "no reward yet" if mean is None else f"reward so far {mean:.3f}"
        spent = now - self._began
        left = max(0, self._per_step - self._ended) * spent / self._ended
        return (
            f"step {self._step + 1}: {self._ended} of {self._per_step} sessions, {reward} "
            f"({spent:.0f} s, about {left:.0f} s left)"
        )
