"""What commands say to a person, and how they fail in front of one."""

from __future__ import annotations

from typing import Any, NoReturn

import orjson
import typer
from rich.console import Console

out = Console()
err = Console(stderr=True)


def print_json(value: Any) -> None:
    """``value`` as one line of JSON on standard output, untouched by terminal width."""
    typer.echo(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode())


def fail(message: str, code: int = 1) -> NoReturn:
    """Ends the command with ``message`` on standard error."""
    err.print(f"[bold red]bridle:[/] {message}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)
