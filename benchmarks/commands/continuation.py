"""``bridle bench continuation``: exact prompts against rendered ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from bridle.cli.options import JsonOption
from bridle.cli.terminal import out, print_json
from bridle.extras import require


def continuation(
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A model directory: time the prompts of its tokenizer and template."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure the time to prompt ids and first token of long sessions, exact against rendered."""
    require("torch", "train", "this bench serves a small policy on torch")
    from bridle.bench.continuation import measure

    found = measure(tokenizer=tokenizer)
    if json:
        print_json(found)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("context", "exact ms", "rendered ms", "ratio", "new tokens"):
        table.add_column(heading, justify="right")
    for context, times in found["contexts"].items():
        table.add_row(
            context,
            f"{times['exact_ms']:.1f}",
            f"{times['rendered_ms']:.1f}",
            f"{times['ratio']:.1f}",
            str(times["tail_tokens"]),
        )
    out.print(table)
    for engine, ratios in (("embedded", "ttft_ratio"), ("scripted", "ttft_ratio_scripted")):
        for context, ratio in found.get(ratios, {}).items():
            out.print(
                f"first token at {context}, through the proxy / asked directly: "
                f"{ratio} ({engine} engine)"
            )
