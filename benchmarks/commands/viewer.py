"""``bridle bench viewer``: the time that the pages take on a large store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, plain_table, print_json


def viewer(
    sessions: Annotated[int, typer.Option(min=1, help="Sessions of the store.")] = 5000,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each page is read.")] = 7,
    store: Annotated[
        Path | None, typer.Option(help="A store of an earlier run, or where to keep this one's.")
    ] = None,
    record_seconds: Annotated[
        float, typer.Option(min=0.1, help="Length of a load on the proxy, in seconds.")
    ] = 5.0,
    record_runs: Annotated[int, typer.Option(min=1, help="Loads on the proxy.")] = 3,
    json: JsonOption = False,
) -> None:
    """Measure the viewer's pages and list actions, and a proxy's calls while pages are read.

    Exit with 1 if a figure is over its bar.
    """
    from bridle.bench.viewer import measure, over_bars

    with err.status("Starting.") as status:
        report = measure(
            sessions,
            repeats,
            store,
            status.update,
            record_s=record_seconds,
            record_runs=record_runs,
        )
    table = plain_table("", "median ms", "largest ms", "bar ms")
    for kind, bar in report["bars_ms"].items():
        for name, times in report[kind].items():
            table.add_row(name, f"{times['median_ms']}", f"{times['largest_ms']}", f"{bar:g}")
    for what, title in (("recording", "recording adds"), ("neighbour", "readers add")):
        of = report[what]
        for key, whose in (("added_ms", "a viewer's"), ("added_own_pages_ms", "its own")):
            for name, bar in of["bars_ms"].items():
                row = f"{title}, {whose} pages read, {name}"
                table.add_row(row, f"{of[key][name]}", "", f"{bar:g}")
    if json:
        print_json(report)
    else:
        out.print(table)
    if over_bars(report):
        raise typer.Exit(1)
