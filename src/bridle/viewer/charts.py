"""Line charts as data for uPlot, and histograms and bars as shares, which templates draw as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

_STAGES: Final = 8
"""The number of colours of the bars."""


@dataclass(frozen=True, slots=True)
class Style:
    """The name and the look of a line."""

    label: str
    shade: int
    """The number of its colour, from 0."""
    dashed: bool = False
    """True for the curve of another run."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Series of values over common steps, the first of the run itself."""

    title: str
    steps: tuple[int, ...]
    """The steps, counted from 1 as the commands do; the store counts them from 0."""
    series: Mapping[str, tuple[float | None, ...]]
    """The values of each series at the steps, by the series' name."""
    styles: tuple[Style, ...] = ()
    """The look of each series."""
    unit: str = ""
    about: str = ""
    """The meaning of the numbers."""

    @property
    def looks(self) -> list[tuple[int, bool]]:
        """The colour of each series, and whether its line is dashed."""
        return [(style.shade, style.dashed) for style in self.styles]

    @property
    def legend(self) -> list[Style]:
        """One line of each colour, if there are several."""
        colours = {style.shade: style for style in reversed(self.styles)}
        return [colours[shade] for shade in sorted(colours)] if len(colours) > 1 else []

    @property
    def last(self) -> float | None:
        first = next(iter(self.series.values()))
        return next((value for value in reversed(first) if value is not None), None)

    @property
    def values(self) -> list[float]:
        return [value for of in self.series.values() for value in of if value is not None]


Series = Sequence[tuple[int, float]]


def chart(
    title: str,
    series: Mapping[str, Series],
    styles: Mapping[str, Style] = MappingProxyType({}),
    unit: str = "",
    about: str = "",
) -> Chart | None:
    """Return series of ``(step, value)`` on common steps, or ``None`` if none has a finite value.

    The later of two values of a step counts.
    """
    finite = {
        name: {step: value for step, value in points if math.isfinite(value)}
        for name, points in series.items()
    }
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return None
    steps = sorted(set().union(*finite.values()))
    lines = {name: tuple(points.get(step) for step in steps) for name, points in finite.items()}
    looks = tuple(styles.get(name, Style(name, place)) for place, name in enumerate(lines))
    return Chart(title, tuple(step + 1 for step in steps), lines, looks, unit, about)


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
    several = high > low
    counts, edges = np.histogram(
        values, bins if several else 1, (low, high if several else low + 1)
    )
    shares = 100 * counts / counts.max()
    return tuple(
        zip(edges.tolist(), edges[1:].tolist(), counts.tolist(), shares.tolist(), strict=False)
    )
