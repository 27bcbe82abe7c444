"""``bridle bench harnesses``: every installed harness, exact and rendered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, fail, out, print_json
from bridle.extras import require


def harnesses(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only this harness; may be repeated.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns with two tool calls each.")] = 12,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions per harness and mode.")] = 1,
    table: Annotated[Path | None, typer.Option(help="Write the table here as Markdown.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Leave the recordings in this folder.")] = None,
    json: JsonOption = False,
) -> None:
    """Run every installed harness, exact and rendered.

    Exit with 1 if an exact conversation breaks.
    """
    from bridle.bench.harnesses import bench_harnesses, chosen, markdown

    try:
        cases = chosen(only or ())
    except KeyError as error:
        fail(f"no harness is called {error}")
    require("torch", "train", "this bench makes a small tokenizer with the trainer")
    report = asyncio.run(
        bench_harnesses(
            cases,
            turns=turns,
            sessions=sessions,
            keep=keep,
            progress=lambda name, mode: err.print(f"{name} {mode}"),
        )
    )
    text = markdown(report)
    if table is not None:
        table.write_text(text, encoding="utf-8")
    if json:
        print_json(report.as_data())
    else:
        out.print(text)
    failures = report.failures()
    for failure in failures:
        err.print(failure)
    if failures:
        raise typer.Exit(1)
