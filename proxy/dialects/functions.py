"""The function tools and their arguments, between providers and engines.

The providers use objects, and the engines use text.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from bridle.proxy.dialects.body import Json, embeddable, json_text, writable
from bridle.proxy.wire.canonical import ApiError

INVALID_JSON: Final = "_invalid_json"
"""Key of an arguments object that carries text which is not a JSON object."""


def function_tool(
    name: str,
    description: str | None,
    parameters: Json | None,
    field: str,
    *,
    strict: bool | None = None,
) -> Json:
    """Return a tool in chat shape.

    ``parameters`` is the JSON schema in ``field``; a function without one takes no parameters.
    ``strict`` is left out unless it is true, since templates show the model every key.
    """
    function: Json = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = writable(parameters, field) or {"type": "object", "properties": {}}
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def named_function(name: str) -> Json:
    """Return the ``tool_choice`` for one function, in chat shape."""
    return {"type": "function", "function": {"name": name}}


def json_schema_format(schema: Json, field: str, name: str = "output", **more: Any) -> Json:
    """Return the ``response_format`` for the JSON schema in ``field``, in chat shape."""
    given = {key: value for key, value in more.items() if value is not None}
    wanted = {"name": name, "schema": writable(schema, field), **given}
    return {"type": "json_schema", "json_schema": wanted}


def arguments_object(arguments: str) -> Json:
    """Return a call's arguments as an object.

    Text that is not one is the value of :data:`INVALID_JSON`.
    """
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
    """Return :func:`arguments_object` as JSON text.

    The text is ``arguments`` itself if it is an object.
    """
    given = arguments_object(arguments)
    if not given or given.keys() == {INVALID_JSON}:
        return json_text(given, "arguments")
    return arguments


def arguments_text(given: Any, field: str) -> str:
    """Return an object of arguments as JSON text: the inverse of :func:`arguments_object`."""
    if given is None:
        return "{}"
    if isinstance(given, dict) and given.keys() == {INVALID_JSON}:
        broken = given[INVALID_JSON]
        if isinstance(broken, str):
            return broken
    return json_text(given, field)


def call_in_pieces(index: int) -> ApiError:
    """Return the error for an engine that returns to a tool call which it had left.

    No provider's stream can express that.
    """
    message = f"The engine's tool call {index} did not come in one piece."
    return ApiError("upstream_error", message, status=502)
