"""Packages that only some commands need."""

from __future__ import annotations

from importlib.util import find_spec

from bridle.cli.terminal import fail


def needs(module: str, extra: str, why: str) -> None:
    """Ends the command with ``why`` and what installs ``module``, when it is not installed."""
    if find_spec(module) is None:
        fail(f"{why}: pip install 'bridle[{extra}]'")
