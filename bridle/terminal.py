"""What commands say to a person, and how they fail in front of one."""

from __future__ import annotations

from typing import Any, NoReturn

import orjson
import typer
from rich.console import Console
from rich.text import Text

# No markup: names, paths and errors have brackets of their own.
out = Console(markup=False)
err = Console(stderr=True, markup=False)


def print_json(value: Any) -> None:
    """``value`` as one line of JSON on standard output, untouched by terminal width."""
    typer.echo(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode())


def fail(message: str, code: int = 1) -> NoReturn:
    """Ends the command with ``message`` on standard error."""
    err.print(Text.assemble(("bridle:", "bold red"), f" {message}"), soft_wrap=True)
    raise typer.Exit(code)
