"""Flatten nested figures into rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(figures: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return ``(dotted key, value)`` of every figure that was measured, in order."""
    rows: list[tuple[str, Any]] = []
    for name, value in figures.items():
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping):
            rows += flat(value, key)
        elif value is not None:
            rows.append((key, value))
    return rows
