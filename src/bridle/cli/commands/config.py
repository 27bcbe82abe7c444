"""``bridle config``: print settings in effect, their JSON schema, or the parts they can name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bridle.cli.terminal import print_json
from bridle.keys import KEYS


def config(
    file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.TOML]", help="A run's settings.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting over those of the file."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file instead.")
    ] = False,
    parts: Annotated[
        bool,
        typer.Option(
            "--parts",
            help="Print the parts that settings can name, and their own options, instead.",
        ),
    ] = False,
) -> None:
    """Print, as JSON, the settings in effect, without secrets.

    For each key it prints only that it is set; it leaves out passwords in URLs.
    """
    from bridle.run.config import RunConfig
    from bridle.run.parts import open_sets

    if parts:
        print_json(open_sets())
        return
    if schema:
        print_json(msgspec.json.schema(RunConfig))
        return
    found: dict[str, Any] = {"environment": _environment()}
    if file is not None:
        found["run"] = msgspec.to_builtins(RunConfig.load(file, assignments or ()))
    print_json(found)


def _environment() -> dict[str, str]:
    """Return Bridle's environment variables by name, with ``set`` in place of each secret."""
    from bridle.store.schema.database import shown

    secrets = {*KEYS, "BRIDLE_SESSION_KEY"}
    found = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("BRIDLE_") or name in secrets
    }
    found |= {name: "set" for name in secrets & found.keys() if found[name]}
    if "BRIDLE_STORE" in found:
        found["BRIDLE_STORE"] = shown(found["BRIDLE_STORE"])
    return found
