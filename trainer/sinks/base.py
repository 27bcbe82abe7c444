"""The interface of metric sinks, and the description of a run that they receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bridle.trainer.batch.fates import StepFates


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The description of a run for a tracker."""

    run_id: str
    """The run's id, which is the same for every attempt."""
    directory: Path
    """The run's output, below which a tracker may keep files."""
    config: Mapping[str, Any]
    """Every setting, as nested plain data."""


class MetricSink(Protocol):
    """A receiver of the numbers of each step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record ``values`` of ``step``.

        Names look like ``reward/mean``. Each step is written once, except after a resume, where the
        later write counts.
        """

    def close(self) -> None:
        """Flush the numbers that are not on disk yet."""


class RunSink(MetricSink, Protocol):
    """A receiver of everything that a loop records of its steps."""

    def account(self, fates: Sequence[StepFates]) -> None:
        """Record where the tokens of steps went whose checkpoint is on disk.

        After a crash the same steps may come again.
        """


class SinkGroup:
    """The sink of a run, which passes every step's numbers on to further sinks."""

    def __init__(self, run: RunSink, further: Sequence[MetricSink]) -> None:
        self._run = run
        self._sinks = (run, *further)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, values)

    def account(self, fates: Sequence[StepFates]) -> None:
        self._run.account(fates)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
