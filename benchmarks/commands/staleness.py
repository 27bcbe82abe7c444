"""``bridle bench staleness``: whether a policy survives sessions that lag behind."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, print_json
from bridle.extras import require

if TYPE_CHECKING:
    from bridle.bench.staleness import StalenessRun


def staleness(
    trust_region: Annotated[
        list[str] | None,
        typer.Option(help="A trust region to measure. Repeatable; default: none and clip."),
    ] = None,
    importance: Annotated[
        list[str] | None,
        typer.Option(help="Importance weights to measure. Repeatable; default: truncate."),
    ] = None,
    lag: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Versions that sessions lag behind. Repeatable; default: 0, 4."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 10,
    first_seed: Annotated[int, typer.Option(min=0, help="The seeds count up from it.")] = 0,
    steps: Annotated[int, typer.Option(min=3, help="Steps of each run.")] = 75,
    rate: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 1e-3,
    by_sessions: Annotated[
        bool, typer.Option(help="Sessions take time; single ones are collected, at a mean lag.")
    ] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="Runs at a time; each takes one core for 20 to 60 seconds.")
    ] = 1,
    json: JsonOption = False,
) -> None:
    """Train a tiny policy with sessions that lag behind by some versions.

    The task is three tool turns. Count the runs whose reward collapses.
    """
    require("torch", "train", "what learns is the trainer's")
    from bridle.bench.staleness import StalenessSettings, bench_staleness, jobs_of, losses_of

    jobs = jobs_of(
        losses_of(trust_region or ("none", "clip"), importance or ("truncate",)),
        lag or (0, 4),
        range(first_seed, first_seed + seeds),
        StalenessSettings(steps=steps, rate=rate, by_sessions=by_sessions),
    )
    runs = []
    for run in bench_staleness(jobs, processes):
        err.print(f"{_case(run)}, seed {run.seed}: {run.final:.2f}")
        runs.append(run)
    runs.sort(key=lambda run: (run.lag, run.trust_region, run.importance, run.seed))
    if json:
        print_json([run.as_data() for run in runs])
        return
    cases: dict[str, list[StalenessRun]] = {}
    for run in runs:
        cases.setdefault(_case(run), []).append(run)
    for case, of in cases.items():
        out.print(_line(case, of))


def _case(run: StalenessRun) -> str:
    return f"lag {run.lag}, {run.importance} weights, trust region {run.trust_region}"


def _line(case: str, runs: Sequence[StalenessRun]) -> str:
    from bridle.bench.staleness import GOOD

    final = " ".join(f"{run.final:.2f}" for run in runs)
    collapsed = sum(run.final < GOOD for run in runs)
    return (
        f"{case}: {collapsed} of {len(runs)} collapsed; reward over the last third {final}; over "
        f"all steps {fmean(fmean(run.rewards) for run in runs):.3f}; "
        f"{fmean(run.outside for run in runs):.1%} of tokens outside; mean lag "
        f"{fmean(run.mean_lag for run in runs):.1f}; time {fmean(run.time for run in runs):.0f}"
    )
