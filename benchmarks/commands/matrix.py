"""``bridle bench matrix``: every installed harness on every family's template."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, fail, out, print_json


def matrix(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only this harness; may be repeated.")
    ] = None,
    family: Annotated[
        list[str] | None, typer.Option("--family", help="Only this family; may be repeated.")
    ] = None,
    sample: Annotated[bool, typer.Option(help="Only a fixed sample of the families.")] = False,
    table: Annotated[Path | None, typer.Option(help="Write the table here as Markdown.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on from this JSON file, and write every further cell to it."),
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Harnesses that run at once.")] = 2,
    keep: Annotated[Path | None, typer.Option(help="Leave the recordings in this folder.")] = None,
    json: JsonOption = False,
) -> None:
    """Run every installed harness on the templates of the model families.

    Exit with 1 if a cell is neither whole nor refused at its first call. With ``--resume``, cells
    that are whole or refused are not run again.
    """
    from bridle.bench.families import FAMILIES
    from bridle.bench.harnesses import chosen
    from bridle.bench.matrix import SAMPLE, Matrix, bench_matrix, markdown

    unknown = sorted(set(family or ()) - FAMILIES.keys())
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose of {', '.join(FAMILIES)}")
    try:
        cases = chosen(only or ())
    except KeyError as error:
        fail(f"no harness is called {error}")

    known = Matrix.read(resume) if resume is not None and resume.exists() else Matrix()

    def progress(made: Matrix, name: str, harness: str) -> None:
        cell = made.cells[name][harness]
        state = "refused" if cell.refused else "; ".join(cell.failures) or "whole"
        err.print(f"{name} {harness}: {state}")
        if resume is not None:
            made.write(resume)

    names = family or (SAMPLE if sample else tuple(FAMILIES))
    made = asyncio.run(
        bench_matrix(names, cases, known=known, parallel=parallel, keep=keep, progress=progress)
    )
    text = markdown(made)
    if table is not None:
        table.write_text(text, encoding="utf-8")
    if json:
        print_json(made.as_data())
    else:
        out.print(text)
    if made.failures():
        raise typer.Exit(1)
