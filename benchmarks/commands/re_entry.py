"""``bridle bench re-entry``: recorded sessions, re-entered at random turns."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bridle.bench.seeded_policy import Kind
from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, fail, out, print_json
from bridle.extras import require


def re_entry(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only this harness; may be repeated.")
    ] = None,
    sandbox: Annotated[
        list[str] | None,
        typer.Option("--sandbox", help="`process` (default), `forked`, `container`; repeatable."),
    ] = None,
    kind: Annotated[
        list[Kind] | None,
        typer.Option("--kind", help="Kind of sessions; may be repeated. Default: `work`."),
    ] = None,
    sessions: Annotated[
        int, typer.Option(min=0, help="Sessions per row of the table; 0 prints it as it is.")
    ] = 10,
    least: Annotated[int, typer.Option(min=4, help="Fewest turns of a session.")] = 5,
    most: Annotated[int, typer.Option(min=4, help="Most turns of a session.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of the work and of the turns.")] = 0,
    parallel: Annotated[int, typer.Option(min=1, help="Sessions that run at once.")] = 2,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Add the sessions to this file, unless it has them, and print all of it."
        ),
    ] = None,
    speed: Annotated[
        bool,
        typer.Option(
            "--speed",
            help="Measure the time instead that re-entering 30 turns of SmolLM2 at the 25th saves.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Record sessions of installed programs, and re-enter each at a random turn.

    Exit with 1 if a session goes wrong in silence, or a first live prompt is not the recorded one.
    """
    from bridle.bench.re_entry import HARNESSES, Draw, bench_re_entry
    from bridle.bench.re_entry_results import Cell, Report

    unknown = sorted(set(only or ()) - set(HARNESSES))
    if unknown:
        fail(f"no harness of this bench is called {', '.join(unknown)}: {', '.join(HARNESSES)}", 2)
    if most < least:
        fail("--most is less than --least", 2)
    require("torch", "train", "this bench makes a small tokenizer with the trainer")
    if speed:
        _speed(json)
        return

    def progress(cell: Cell) -> None:
        outcome = "re-entered" if cell.entered else ", ".join((*cell.stopped, *cell.problems))
        err.print(f"{cell.name}, seed {cell.seed}: {outcome}", highlight=False, markup=False)

    report = Report() if results is None else Report.read(results)
    asyncio.run(
        bench_re_entry(
            only or HARNESSES,
            sandbox or ("process",),
            kind or (Kind.WORK,),
            Draw(sessions, least, most, seed, parallel),
            report,
            progress,
        )
    )
    if json:
        print_json([asdict(cell) for cell in report.cells()])
    else:
        out.print(report.markdown(), highlight=False, soft_wrap=True, markup=False)
    if report.failures():
        raise typer.Exit(1)


def _speed(json: bool) -> None:
    from bridle.bench.re_entry_speed import measure
    from bridle.recipes.models.smollm2 import smollm2_directory

    found = measure(smollm2_directory())
    if json:
        print_json({**asdict(found), "share": found.share})
    else:
        out.print(found.text(), highlight=False, soft_wrap=True, markup=False)
    if found.failures():
        raise typer.Exit(1)
