"""``bridle bench collect``: the share of slots that sessions occupy while a policy trains."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, print_json
from bridle.extras import require

BOUNDS = {"groups": (0, 1, 2, 4, 8), "sessions": (1, 2, 4, 8)}
"""The bounds that are measured if none is named, by the unit that a step takes."""


def collect(
    max_staleness: Annotated[
        list[int] | None,
        typer.Option(min=0, help="A bound to measure. Repeatable; default: up to 8."),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 64,
    groups: Annotated[int, typer.Option(min=1, help="Groups per step.")] = 8,
    group_size: Annotated[int, typer.Option(min=1, help="Sessions per group.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 40,
    median: Annotated[float, typer.Option(min=0.001, help="Seconds of a middling session.")] = 0.2,
    collection: Annotated[
        Literal["groups", "sessions"], typer.Option(help="The unit that a step takes.")
    ] = "groups",
    train: Annotated[float, typer.Option(min=0, help="Seconds of an update.")] = 0.05,
    streamed: Annotated[
        bool, typer.Option("--streamed", help="Stream through a proxy; publish to its engine.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure slot use with sessions whose times are lognormal (σ = 1).

    They sleep, or are streamed by a scripted engine.
    """
    require("torch", "train", "the collector is the trainer's")
    from bridle.bench.collect import CollectSettings, SleepingSessions, bench_collect
    from bridle.bench.collect_streamed import StreamedSessions

    settings = CollectSettings(
        slots,
        group_size,
        groups,
        steps=steps,
        median_s=median,
        train_s=train,
        collection=collection,
    )
    of = StreamedSessions if streamed else SleepingSessions
    found = []
    for bound in max_staleness or BOUNDS[collection]:
        err.print(f"{steps} steps at staleness {bound}")
        found.append(bench_collect(settings, bound, of))
    if json:
        print_json([figures.as_data() for figures in found])
        return
    for figures in found:
        out.print(
            f"staleness {figures.max_staleness} (mean {figures.mean_lag:.1f}, at most "
            f"{figures.staleness}): slots {figures.slot_use:.2f} used, {figures.useful:.2f} "
            f"useful; of the least trained decile of durations {min(figures.deciles):.2f}; "
            f"{figures.seconds_per_step:.2f} s a step"
        )
