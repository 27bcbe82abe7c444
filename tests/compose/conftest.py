"""The compose files as data, with their variables filled in, and what commands in files may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from bridle.cli.program import app

ROOT = Path(__file__).parents[2]
_VARIABLE = re.compile(r"\$\{(\w+)(?::?(?P<kind>[-?])(?P<text>[^}]*))?\}")


class NotSet(Exception):
    """A variable that a file demands is not set."""


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """``value`` with ``${NAME}``, ``${NAME:-default}`` and ``${NAME:?message}`` filled in."""
    if isinstance(value, dict):
        return {key: interpolated(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolated(each, variables) for each in value]
    if not isinstance(value, str):
        return value

    def fill(found: re.Match[str]) -> str:
        name, text = found[1], found["text"] or ""
        if variables.get(name):
            return variables[name]
        if found["kind"] == "?":
            raise NotSet(f"{name}: {text}")
        return text

    return _VARIABLE.sub(fill, value)


@pytest.fixture
def compose_file() -> Any:
    def compose_file(name: str, **variables: str) -> dict[str, Any]:
        document: dict[str, Any] = interpolated(
            yaml.safe_load((ROOT / name).read_text()), variables
        )
        return document

    return compose_file


@pytest.fixture
def require_command(tmp_path: Path) -> Callable[[list[str]], None]:
    """Fails for a command that ``bridle`` does not have, or an option that it does not take."""

    def require(arguments: list[str]) -> None:
        arguments = [part.replace("/data/policy", str(tmp_path)) for part in arguments]
        command: Any = typer.main.get_command(app)
        context = command.context_class(command)
        while isinstance(command, TyperGroup):
            _, found, arguments = command.resolve_command(context, arguments)
            assert found is not None
            command = found
        command.make_context(command.name, arguments)

    return require
