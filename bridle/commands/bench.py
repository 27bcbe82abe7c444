"""``bridle bench``: what Bridle costs, measured on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from bridle.options import JsonOption
from bridle.terminal import err, out, print_json

app = typer.Typer(help="Measure.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure what Bridle costs on this machine."""


@app.command("store")
def store(
    postgresql: Annotated[
        str | None, typer.Option(help="URL of a PostgreSQL database to write to as well.")
    ] = None,
    turns: Annotated[
        list[int] | None, typer.Option(min=1, help="Only sessions of this length. Repeatable.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Bytes per unique token, growth with the session's length, and durable commits a second."""
    from bridle.bench.store import TURNS, bench

    with err.status("Recording sessions."):
        report = bench(tuple(turns) if turns else TURNS, postgresql)
    _print(report, json)


@app.command("reconstruct")
def reconstruct(
    sessions: Annotated[int, typer.Option(min=1, help="Sessions in the store.")] = 1000,
    json: JsonOption = False,
) -> None:
    """Unique tokens a second from the store to samples, and the memory that takes."""
    from bridle.bench.reconstruct import bench

    with err.status("Filling a store."):
        report = bench(sessions)
    _print(report, json)


def _print(report: dict[str, Any], json: bool) -> None:
    if json:
        print_json(report)
        return
    table = Table("figure", "", box=None, pad_edge=False, show_header=False)
    for key, value in _flat("", report):
        table.add_row(key, value if isinstance(value, str) else f"{value:,}")
    out.print(table)


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [
            leaf
            for name, inner in value.items()
            for leaf in _flat(f"{prefix}.{name}" if prefix else name, inner)
        ]
    return [] if value is None else [(prefix, value)]
