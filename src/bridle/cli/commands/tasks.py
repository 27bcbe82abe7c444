"""``bridle tasks``: make tasks of other forms into Harbor folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.terminal import counted, out

app = typer.Typer(no_args_is_help=True, help="Tasks of other forms, as Harbor folders.")


@app.callback()
def tasks() -> None:
    """Tasks of other forms, as Harbor folders."""


@app.command("convert")
def convert_rows(
    kind: Annotated[str, typer.Argument(help="swebench, swe-smith, swe-gym, swe-rebench or r2e.")],
    rows: Annotated[Path, typer.Argument(help="A .jsonl, .json or .parquet file.")],
    target: Annotated[Path, typer.Argument(help="Folder that receives a folder per task.")],
) -> None:
    """Write a Harbor folder for each row; run them by --tasks harbor:TARGET."""
    from bridle.harnesses.tasks.harbor.swe import convert, rows_in

    count = sum(1 for _ in convert(kind, rows_in(rows), target))
    out.print(f"{counted(count, 'task')} in {target}")
