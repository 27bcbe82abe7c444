"""Functions between providers that speak in objects and engines that speak in text."""

from __future__ import annotations

from typing import Any, Final

import orjson

from bridle.proxy.dialects.fields import Fields, embeddable, json_text, writable

INVALID_JSON: Final = "_invalid_json"
"""Key of an arguments object that carries text which is not a JSON object."""


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


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; whatever is not one travels whole under
    :data:`INVALID_JSON`."""
    if not arguments.strip():
        return {}
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {INVALID_JSON: arguments}
    if not isinstance(value, dict) or not embeddable(value):
        return {INVALID_JSON: arguments}
    return value


def arguments_object_text(arguments: str) -> str:
    """:func:`arguments_object` as JSON text: ``arguments`` themselves when they are an object."""
    given = arguments_object(arguments)
    if not given or given.keys() == {INVALID_JSON}:
        return json_text(given, "arguments")
    return arguments


def arguments_text(given: Any, where: str) -> str:
    """An object of arguments as JSON text: the way back from :func:`arguments_object`."""
    if given is None:
        return "{}"
    if isinstance(given, dict) and given.keys() == {INVALID_JSON}:
        broken = given[INVALID_JSON]
        if isinstance(broken, str):
            return broken
    return json_text(given, where)
