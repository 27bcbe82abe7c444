"""The table that ``bridle bench learning --table`` writes: how fast each case learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bridle.bench.collect import CollectFigures, CollectSettings, bench_collect
from bridle.recipes.learning.sparse import (
    PLACES,
    STEPS,
    WAYS,
    LearningFigures,
    LearningSettings,
    rows,
)

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


def table(
    found: Sequence[LearningFigures],
    bounds: Sequence[CollectFigures],
    refills: Sequence[CollectFigures],
    settings: LearningSettings,
) -> str:
    """Return the published table as Markdown."""
    size = settings.groups * settings.group_size
    lines = [
        "# What learns how fast",
        "",
        "Written by `bridle bench learning --table`. The task is made by rule: at most",
        f"{STEPS} steps, {WAYS} ways in each, a start drawn among {PLACES} places, and a reward",
        "of 1 at the goal alone. The policy is a table of logits; credit, losses and corrections",
        f"are the trainer's. {size} sessions a step, AdamW at {settings.rate}, median of",
        f"{settings.seeds} seeds, from {settings.first_seed} on; a run ends after",
        f"{settings.most * size} sessions.",
        "",
        *rows(found, settings),
    ]
    lines += [
        "",
        f"Collection from {SLOW.slots} slots, where sessions sleep for lognormal times (σ = 1):",
        "",
        "| `max_staleness` | slots used | seconds a step | speed |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for bound in bounds:
        speed = bounds[0].seconds_per_step / bound.seconds_per_step
        lines.append(
            f"| {bound.max_staleness} | {bound.slot_use:.2f} | {bound.seconds_per_step:.2f} | "
            f"{speed:.2f} |"
        )
    lines += [
        "",
        "Every other group has equal rewards:",
        "",
        "| `refill` | live groups, of those that a step asks for |",
        "| ---: | ---: |",
        *(
            f"| {refill:g} | {each.live:.2f} |"
            for refill, each in zip(REFILLS, refills, strict=True)
        ),
        "",
    ]
    return "\n".join(lines)
