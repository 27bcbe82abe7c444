"""``bridle bench proxy``: the cost of the proxy, compared with direct calls and a bare proxy."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.table import Table

from bridle.cli.figures import flat
from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, fail, out, print_json
from bridle.extras import require


def proxy(
    runs: Annotated[int, typer.Option(min=1, help="Figures are medians over so many runs.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.05, help="Length of each load.")] = 2.0,
    case: Annotated[list[str] | None, typer.Option(help="Only this case. Repeatable.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=2, help="Compare so many processes with one, on all cores.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="With --workers: an empty store, such as a PostgreSQL URL.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure recorded calls per second, added latency, streams and memory of the proxy."""
    from bridle.bench.proxy import CASES, measure
    from bridle.bench.workers import measure_workers

    if workers is None and store is not None:
        fail("--store is for --workers; without it the store is a new file", 2)
    if workers is not None and case:
        fail("--workers has cases of its own: leave --case out", 2)
    known = [one.name for one in CASES]
    if unknown := [name for name in case or () if name not in known]:
        fail(f"there is no case {unknown[0]}; there are {', '.join(known)}")
    with err.status("Starting.") as status, TemporaryDirectory(prefix="bridle-bench-") as folder:
        if workers is not None:
            report = measure_workers(
                workers,
                store or f"{folder}/bench.db",
                runs=runs,
                seconds=seconds,
                progress=lambda text: status.update(text),
            )
        else:
            require("aiohttp", "bench", "the floor is a pass-through on aiohttp")
            report = measure(
                runs=runs,
                seconds=seconds,
                cases=[one for one in CASES if not case or one.name in case],
                progress=lambda text: status.update(text),
            )
    if json:
        print_json(report)
    else:
        table = Table(box=None, pad_edge=False)
        table.add_column("figure", no_wrap=True)
        table.add_column("bridle", justify="right")
        for key, value in flat(report):
            table.add_row(key, f"{value:,}")
        out.print(table)
