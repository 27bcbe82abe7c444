"""``bridle bench path``: the length of one call's path through the recorder."""

from __future__ import annotations

from rich.table import Table

from bridle.cli.figures import flat
from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, out, print_json
from bridle.extras import require


def path(json: JsonOption = False) -> None:
    """Count modules, hops and function calls of one recorded chat call with the profiler."""
    require("torch", "train", "this bench trains a small tokenizer beside the policy's code")
    from bridle.bench.path import measure

    with err.status("Starting."):
        report = measure()
    if json:
        print_json(report)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("count", justify="right")
    for key, value in flat(report):
        table.add_row(key, str(value))
    out.print(table)
