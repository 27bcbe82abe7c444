"""``bridle bench models``: genuine model families through the proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from bridle.cli.options import JsonOption
from bridle.cli.terminal import out, print_json


def models(
    names: Annotated[
        list[str] | None, typer.Argument(help="Families to try; all of them when none is named.")
    ] = None,
    json: JsonOption = False,
    table: Annotated[
        Path | None, typer.Option(help="Write the notes on the families to this Markdown file.")
    ] = None,
) -> None:
    """Lead a conversation with every model family through the proxy, and count what is exact."""
    from bridle.bench.families import FAMILIES
    from bridle.bench.model_notes import page
    from bridle.bench.models import measure

    unknown = sorted(set(names or ()) - FAMILIES.keys())
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose of {', '.join(FAMILIES)}")
    found = measure(names or FAMILIES)
    if table is not None:
        table.write_text(page(found))
    if json:
        print_json(found)
        return
    shown = Table(box=None, pad_edge=False)
    for heading in ("family", "verdict", "rows", "breaks", "outside", "errors", "rendered breaks"):
        shown.add_column(heading)
    for name, figures in found.items():
        if "not_fetched" in figures:
            shown.add_row(name, figures["not_fetched"])
            continue
        exact, rendered = figures["exact"], figures["rendered"]
        shown.add_row(
            name,
            "right" if figures["verdict_right"] else "wrong",
            f"{exact['rows_per_session']:.2f}",
            str(exact["breaks"]),
            str(figures["outside_differences"]),
            str(len(exact["errors"])),
            str(rendered["breaks"]),
        )
    out.print(shown)
