"""``bridle bench pages``: the CPU time of the pages of a large store, and of a call in it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, plain_table, print_json


def pages(
    calls: Annotated[int, typer.Option(min=1000, help="Calls of the store.")] = 100_000,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each page is read.")] = 3,
    store: Annotated[
        str | None, typer.Option(help="A store of an earlier run, or where to keep this one's.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure the CPU time of pages, searches, findings and calls in a store of many calls.

    Exit with 1 if a figure is over its bar.
    """
    from bridle.bench.pages import measure, over_bars

    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder, err.status("") as status:
        place = store or str(Path(folder) / "store.db")
        report = measure(place, calls, repeats, status.update)
    if json:
        print_json(report)
    else:
        table = plain_table("", "CPU ms", "bar ms")
        for kind, bar in report["bars"].items():
            for name, ms in report[kind].items():
                table.add_row(name, f"{ms:g}", f"{bar:g}")
        for name, value in report["call"].items():
            table.add_row(f"call, {name}", f"{value:g}", "")
        out.print(table)
    if over_bars(report):
        raise typer.Exit(1)
