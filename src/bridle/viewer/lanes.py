"""A run's sessions over time, each in a lane of its own, to show waiting times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bridle.diagnosis.pages import SessionLine

WIDTH: Final = 1000.0
"""The width of the drawing, from the first session's start to the last one's end."""
PHASES: Final = ("before the first call", "calls", "after the last call")
"""The set-up of the session; the harness at work; the verifier and the rest."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a lane."""

    name: str
    seconds: float
    x: float
    width: float
    """The width of the phase, in the units of :data:`WIDTH`."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A session's lane."""

    line: SessionLine
    phases: tuple[Phase, ...]
    stages: Mapping[str, float]
    """Seconds of each stage; empty if the rollout did not measure them."""


@dataclass(frozen=True, slots=True)
class Lanes:
    seconds: float
    """Seconds from the first session's start to the last one's end."""
    lanes: Sequence[Lane]


def lanes_of(lines: Sequence[SessionLine]) -> Lanes:
    """Return the lanes of these sessions, in their order.

    The lane of a running session ends at its last call.
    """
    if not lines:
        return Lanes(0.0, ())
    spans = [_times(line) for line in lines]
    begin, end = min(times[0] for times in spans), max(times[-1] for times in spans)
    scale = WIDTH / max(end - begin, 1e-9)
    drawn = []
    for line, times in zip(lines, spans, strict=True):
        phases = [
            Phase(name, to - at, round((at - begin) * scale, 1), round((to - at) * scale, 1))
            for name, at, to in zip(PHASES, times, times[1:], strict=False)
            if to > at
        ]
        stages = line.record.labels.get("seconds")
        drawn.append(Lane(line, tuple(phases), stages if isinstance(stages, dict) else {}))
    return Lanes(end - begin, drawn)


def _times(line: SessionLine) -> tuple[float, float, float, float]:
    """Return when a session was opened, its first call began, its last ended, and it was sealed.

    No time is before the one that precedes it.
    """
    opened = line.record.created_at
    first = max(opened, line.started_at or opened)
    last = max(first, line.ended_at or first)
    return opened, first, last, max(last, line.record.sealed_at or last)
