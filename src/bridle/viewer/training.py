"""Groups and runs as the pages show them: outcomes of groups, figures by step, tasks over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Final

from bridle.diagnosis.pages import Placed
from bridle.store.diagnostics import SECTIONS, Diagnostic, declared
from bridle.store.records import Metric
from bridle.viewer.charts import Bar, Chart, Series, Style, bar, chart

_LINES: Final = 8
"""Maximum number of lines of a run in one chart."""


class GroupOutcome(StrEnum):
    """The kind of a group, by the rewards of its sessions."""

    SOLVED = "solved"
    """Every reward is the same and at least 1."""
    MIXED = "mixed"
    """The rewards differ; only such groups have an advantage."""
    FAILED = "failed"
    """Every reward is the same and at most 0."""
    EQUAL = "equal"
    """Every reward is the same, between 0 and 1."""
    UNREWARDED = "unrewarded"


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions of one task that are compared with each other."""

    id: str
    task: str | None
    sessions: tuple[Placed, ...]

    @property
    def rewards(self) -> list[float]:
        return [s.reward for s in self.sessions if s.reward is not None]

    @property
    def mean(self) -> float | None:
        return fmean(self.rewards) if self.rewards else None

    @property
    def version(self) -> int | None:
        """The oldest policy version that sampled in it."""
        return min((s.version for s in self.sessions if s.version is not None), default=None)

    @property
    def outcome(self) -> GroupOutcome:
        values = self.rewards
        if not values:
            return GroupOutcome.UNREWARDED
        if min(values) != max(values):
            return GroupOutcome.MIXED
        if values[0] >= 1:
            return GroupOutcome.SOLVED
        return GroupOutcome.FAILED if values[0] <= 0 else GroupOutcome.EQUAL


def groups_of(placed: Sequence[Placed]) -> list[Group]:
    """Return the groups of sessions, newest first."""
    members: dict[str, list[Placed]] = {}
    for session in placed:
        if session.group is not None:
            members.setdefault(session.group, []).append(session)
    return [Group(name, of[0].task, tuple(of)) for name, of in reversed(members.items())]


def outcome_bars(groups: Sequence[Group]) -> list[tuple[int | None, tuple[Bar, ...]]]:
    """Return the groups by outcome for each policy version, oldest first."""
    counted: dict[int | None, Counter[str]] = {}
    for group in groups:
        counted.setdefault(group.version, Counter())[group.outcome.value] += 1
    order = sorted(counted, key=lambda version: -1 if version is None else version)
    return [
        (version, bar({kind.value: counted[version][kind.value] for kind in GroupOutcome}))
        for version in order
    ]


@dataclass(frozen=True, slots=True)
class TaskChange:
    """The first and the last group of a task in a run."""

    task: str
    before: Group
    after: Group

    @property
    def change(self) -> float | None:
        if self.before.mean is None or self.after.mean is None:
            return None
        return self.after.mean - self.before.mean


def task_changes(groups: Sequence[Group]) -> list[TaskChange]:
    """Return the tasks with more than one group, the greatest change first."""
    by_task: dict[str, list[Group]] = {}
    for group in reversed(groups):
        if group.task is not None:
            by_task.setdefault(group.task, []).append(group)
    found = [TaskChange(task, of[0], of[-1]) for task, of in by_task.items() if len(of) > 1]
    return sorted(found, key=lambda change: -abs(change.change or 0.0))


def by_name(metrics: Sequence[Metric]) -> dict[str, Series]:
    """Return a run's numbers by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for metric in metrics:
        found.setdefault(metric.name, []).append((metric.step, metric.value))
    return dict(found)


def charts(runs: Mapping[str, Mapping[str, Series]]) -> list[tuple[str, list[Chart]]]:
    """Return the charts of one run, or of several on common axes, by the headings of sections.

    What a chart shows is declared in :mod:`bridle.store.diagnostics`.
    """
    sections = []
    for section in SECTIONS:
        titles = dict.fromkeys(one.chart for one in section.diagnostics if one.chart)
        drawn = [
            made
            for title in titles
            if (made := _chart([d for d in section.diagnostics if d.chart == title], runs))
        ]
        if drawn:
            sections.append((section.title, drawn))
    return sections


def _chart(shown: Sequence[Diagnostic], runs: Mapping[str, Mapping[str, Series]]) -> Chart | None:
    names = [name for one in shown for name in _names(one, runs)][:_LINES]
    series: dict[str, Series] = {}
    styles: dict[str, Style] = {}
    for place, (run, of) in enumerate(runs.items()):
        for shade, name in enumerate(names):
            if name in of:
                line = run if len(names) == 1 else f"{name} {run}"
                series[line] = of[name]
                styles[line] = Style(name.rpartition("/")[2], shade, place > 0)
    about = "; ".join(f"{one.name}: {one.meaning}" for one in shown)
    return chart(shown[0].chart, series, styles, shown[0].unit, about)


def _names(one: Diagnostic, runs: Mapping[str, Mapping[str, Series]]) -> list[str]:
    """Return the names of a declaration that any run has, shorter ones first."""
    if one.prefix is None:
        return [one.name] if any(one.name in of for of in runs.values()) else []
    known = {name for of in runs.values() for name in of if declared(name) is one}
    return sorted(known, key=lambda name: (len(name), name))


def stage_lanes(
    series: Mapping[str, Series],
) -> tuple[list[str], list[tuple[int, tuple[Bar, ...]]]]:
    """Return the stages of a step, and for each step the seconds that each stage took."""
    stages = [name for name in series if name.startswith("seconds/")]
    steps: dict[int, dict[str, float]] = {}
    for stage in stages:
        for step, seconds in series[stage]:
            steps.setdefault(step, {})[stage.removeprefix("seconds/")] = seconds
    names = [stage.removeprefix("seconds/") for stage in stages]
    ordered = [
        (step, bar({name: steps[step].get(name, 0.0) for name in names})) for step in sorted(steps)
    ]
    return names, ordered
