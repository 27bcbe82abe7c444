"""``bridle bench proxy``: the cost of the proxy, compared with direct calls and other proxies."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from bridle.cli.figures import flat
from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, fail, out, print_json
from bridle.extras import require


def proxy(
    peer: Annotated[
        list[str] | None,
        typer.Option(help="NAME=URL of another proxy, with /v1; may hold {session}. Repeatable."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Figures are medians over so many runs.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.05, help="Length of each load.")] = 2.0,
    case: Annotated[list[str] | None, typer.Option(help="Only this case. Repeatable.")] = None,
    json: JsonOption = False,
) -> None:
    """Measure recorded calls per second, added latency, streams and memory of the proxy."""
    from bridle.bench.proxy import CASES, measure

    require("aiohttp", "bench", "the floor is a pass-through on aiohttp")
    known = [one.name for one in CASES]
    if unknown := [name for name in case or () if name not in known]:
        fail(f"there is no case {unknown[0]}; there are {', '.join(known)}")
    peers = dict(_peer(text) for text in peer or ())
    with err.status("Starting.") as status:
        report = measure(
            peers=peers,
            runs=runs,
            seconds=seconds,
            cases=[one for one in CASES if not case or one.name in case],
            progress=lambda text: status.update(text),
        )
    if json:
        print_json(report)
    else:
        out.print(_table({"bridle": report, **report["peers"]}))


def _peer(text: str) -> tuple[str, str]:
    name, mark, url = text.partition("=")
    if not mark or not name or "://" not in url:
        fail(f"--peer takes NAME=URL, not {text!r}")
    return name, url.rstrip("/")


def _table(targets: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    for name in targets:
        table.add_column(name, justify="right")
    rows: dict[str, list[str]] = {}
    for position, report in enumerate(targets.values()):
        for key, value in flat({k: v for k, v in report.items() if k != "peers"}):
            rows.setdefault(key, ["–"] * len(targets))[position] = f"{value:,}"
    for key, values in rows.items():
        table.add_row(key, *values)
    return table
