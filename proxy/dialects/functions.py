"""A client's tool definition as the function tool that engines know."""

from __future__ import annotations

from typing import Any

from proxy.dialects.fields import Fields, writable


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool = False
) -> dict[str, Any]:
    """Chat-shaped; a function without ``parameters`` takes none. ``strict`` is left out unless it
    is asked for, since templates show engines' models every key."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def schema_of(tool: Fields, name: str) -> dict[str, Any] | None:
    """The JSON schema in the field ``name``."""
    schema = tool.child(name)
    return writable(schema.data, schema.where) if schema else None
