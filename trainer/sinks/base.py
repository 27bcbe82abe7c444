"""What takes a run's numbers, and what it is told of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run, as a tracker shows it."""

    run_id: str
    """The same for every attempt of the run."""
    directory: Path
    """The run's output, below which a tracker may keep files."""
    config: Mapping[str, Any]
    """Every setting, as nested plain data."""


class MetricSink(Protocol):
    """Takes the numbers of each step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keep ``values`` of ``step``. Names look like ``reward/mean``; a step comes once, except
        after a resume, where the later one counts."""

    def close(self) -> None:
        """Flush what is not on disk yet."""


class SinkGroup:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
