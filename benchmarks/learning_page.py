"""The page that ``bridle bench learning --table`` writes: how fast each method learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bridle.bench.collect import CollectFigures, CollectSettings, bench_collect
from bridle.recipes.learning.runs import (
    Judged,
    LearningFigures,
    LearningSettings,
    judged,
    rows,
)
from bridle.recipes.learning.scenarios import DEFAULT, RATE, scenario

SLOW = CollectSettings(steps=20)
BOUNDS = (0, 2)
REFILLS = (1.0, 8.0)


def measured() -> tuple[list[CollectFigures], list[CollectFigures]]:
    """Measure collection at each of :data:`BOUNDS`, and at each of :data:`REFILLS`.

    At the latter, rewards are equal in every other group.
    """
    bounds = [bench_collect(SLOW, bound) for bound in BOUNDS]
    degenerate = replace(SLOW, half_degenerate=True)
    return bounds, [bench_collect(replace(degenerate, refill=refill), 0) for refill in REFILLS]


def page(
    found: Sequence[LearningFigures],
    bounds: Sequence[CollectFigures],
    refills: Sequence[CollectFigures],
    settings: LearningSettings,
) -> str:
    """Return the published page as Markdown."""
    others = [one for one in found if one.name != DEFAULT]
    equal = [f"{one.name} ({one.scenario})" for one in others if not one.differs]
    lines = [
        "# What learns how fast",
        "",
        "Written by `bridle bench learning --table docs/learning.md`. Tasks are made by rule, and",
        "the policy is a table of logits; credit, filters, losses and corrections are the",
        f"trainer's. AdamW at {RATE:g}, median of {settings.seeds} seeds from",
        f"{settings.first_seed} on; a run ends when {settings.goal:.0%} of its sessions reach the",
        "goal, or after 150 steps. The expectations were written before the runs. A missed one is",
        "a result about this task, and stays.",
        "",
        f"{len(others) - len(equal)} of {len(others)} rows differ from their scenario's default"
        + (f"; equal: {', '.join(equal)}." if equal else "."),
        "",
        "## Expectations",
        "",
        "| method | scenario | claim | sessions | measured | |",
        "| --- | --- | --- | ---: | ---: | --- |",
        *map(_judged, judged(found)),
    ]
    for name in dict.fromkeys(one.scenario for one in found):
        own = [one for one in found if one.scenario == name]
        lines += ["", f"## {name.capitalize()}", "", scenario(name).about, ""]
        lines += rows(own, settings)
    return "\n".join([*lines, "", *_collection(bounds, refills), ""])


def _judged(one: Judged) -> str:
    expected = one.expectation
    ratio = "not reached" if one.ratio is None else f"{one.ratio:.2f}"
    bound = f"{expected.bound} of {expected.against}'s"
    result = "met" if one.met else "**missed**"
    cells = (expected.method, expected.scenario, expected.claim, bound, ratio, result)
    return f"| {' | '.join(cells)} |"


def _collection(
    bounds: Sequence[CollectFigures], refills: Sequence[CollectFigures]
) -> Iterator[str]:
    yield "## Staleness and refill"
    yield ""
    yield f"Collection from {SLOW.slots} slots, where sessions sleep for lognormal times (σ = 1):"
    yield ""
    yield "| `max_staleness` | slots used | speed |"
    yield "| ---: | ---: | ---: |"
    for bound in bounds:
        speed = bounds[0].seconds_per_step / bound.seconds_per_step
        yield f"| {bound.max_staleness} | {bound.slot_use:.2f} | {speed:.2f} |"
    yield ""
    yield "Every other group has equal rewards:"
    yield ""
    yield "| `refill` | live groups, of those that a step asks for |"
    yield "| ---: | ---: |"
    for refill, each in zip(REFILLS, refills, strict=True):
        yield f"| {refill:g} | {each.live:.2f} |"
