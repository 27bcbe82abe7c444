"""Line charts, histograms and bars as SVG coordinates, drawn by the templates without a script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 320
HEIGHT: Final = 96
_STAGES: Final = 8
"""The number of colours of the bars."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart."""

    name: str
    points: str
    """The ``x,y`` pairs for a polyline."""
    last: float
    shade: int
    """The number of the colour: 0 for the first series, 1 for the compared one."""
    marks: tuple[tuple[float, float, str], ...]
    """The ``x``, ``y`` and text of each value."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    lines: tuple[Line, ...]
    low: float
    high: float
    first: int
    """The step at the left edge; ``last`` is the one at the right edge. Both are counted from 0, as
    in the store; pages and the texts of marks count from 1, as the commands do."""
    last: int


Series = Sequence[tuple[int, float]]


def chart(title: str, series: Mapping[str, Series], shades: Mapping[str, int]) -> Chart | None:
    """Return series of ``(step, value)`` on common axes, or ``None`` if none has a finite value.

    The vertical axis has zero.
    """
    finite = {
        name: [(step, value) for step, value in points if math.isfinite(value)]
        for name, points in series.items()
    }
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return None
    values = [value for points in finite.values() for _, value in points]
    steps = [step for points in finite.values() for step, _ in points]
    low, high, first, last = min(0.0, *values), max(values), min(steps), max(steps)
    span, width = (high - low) or 1.0, (last - first) or 1

    def place(step: int, value: float) -> tuple[float, float]:
        x = 4 + (WIDTH - 8) * (step - first) / width
        y = HEIGHT - 6 - (HEIGHT - 12) * (value - low) / span
        return round(x, 1), round(y, 1)

    lines = []
    for name, points in finite.items():
        placed = [(*place(step, value), f"step {step + 1}: {value:.4g}") for step, value in points]
        joined = " ".join(f"{x},{y}" for x, y, _ in placed)
        lines.append(Line(name, joined, points[-1][1], shades[name], tuple(placed)))
    return Chart(title, tuple(lines), low, high, first, last)


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a bar; ``share`` and ``start`` are in percent of the bar's length."""

    name: str
    value: float
    share: float
    start: float
    shade: int
    """The number of its colour, from 0."""


def bar(parts: Mapping[str, float]) -> tuple[Bar, ...]:
    """Return the parts of a whole, side by side."""
    total, at, bars = sum(parts.values()) or 1.0, 0.0, []
    for shade, (name, value) in enumerate(parts.items()):
        share = 100 * value / total
        bars.append(Bar(name, value, round(share, 2), round(at, 2), shade % _STAGES))
        at += share
    return tuple(bars)


def histogram(
    values: Sequence[float], bins: int = 10
) -> tuple[tuple[float, float, int, float], ...]:
    """Return the bins between the least and the largest value.

    A bin has both its edges, its count, and the count in percent of the largest one.
    """
    if not values:
        return ()
    low, high = min(values), max(values)
    width = (high - low) / bins or 1.0
    counts = [0] * (bins if high > low else 1)
    for value in values:
        counts[min(len(counts) - 1, int((value - low) / width))] += 1
    most = max(counts)
    return tuple(
        (low + width * index, low + width * (index + 1), count, 100 * count / most)
        for index, count in enumerate(counts)
    )
