"""``bridle bench viewer``: how long the pages take on a large store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, print_json


def viewer(
    sessions: Annotated[int, typer.Option(min=1, help="Sessions of the store.")] = 5000,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each page is read.")] = 7,
    store: Annotated[
        Path | None, typer.Option(help="A store of an earlier run, or where to keep this one's.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Time the viewer's pages and list actions; exit with 1 when a median is over its bar."""
    from bridle.bench.viewer import measure

    with err.status("Starting.") as status:
        report = measure(sessions, repeats, store, status.update)
    over = False
    table = Table(box=None, pad_edge=False)
    for name in ("", "median ms", "largest ms", "bar ms"):
        table.add_column(name, justify="right" if name else "left")
    for kind, bar in report["bars_ms"].items():
        for name, times in report[kind].items():
            over |= times["median_ms"] > bar
            table.add_row(name, f"{times['median_ms']}", f"{times['largest_ms']}", f"{bar:g}")
    if json:
        print_json(report)
    else:
        out.print(table)
    if over:
        raise typer.Exit(1)
