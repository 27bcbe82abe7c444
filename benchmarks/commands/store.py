"""``bridle bench store`` and ``bridle bench reconstruct``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from bridle.cli.figures import flat
from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, print_json


def store(
    postgresql: Annotated[
        str | None, typer.Option(help="URL of a PostgreSQL database to write to as well.")
    ] = None,
    turns: Annotated[
        list[int] | None, typer.Option(min=1, help="Only sessions of this length. Repeatable.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure bytes per unique token, growth with session length, and durable commits a second."""
    from bridle.bench.store import TURNS, bench

    with err.status("Recording sessions."):
        report = bench(tuple(turns) if turns else TURNS, postgresql)
    _print(report, json)


def reconstruct(
    sessions: Annotated[int, typer.Option(min=1, help="Sessions in the store.")] = 1000,
    json: JsonOption = False,
) -> None:
    """Measure unique tokens per second from the store to samples, and the memory this takes."""
    from bridle.bench.reconstruct import bench

    with err.status("Filling a store."):
        report = bench(sessions)
    _print(report, json)


def _print(report: dict[str, Any], json: bool) -> None:
    if json:
        print_json(report)
        return
    table = Table("figure", "", box=None, pad_edge=False, show_header=False)
    for key, value in flat(report):
        table.add_row(key, value if isinstance(value, str) else f"{value:,}")
    out.print(table)
