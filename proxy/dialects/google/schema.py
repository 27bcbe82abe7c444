"""The names and schemas of Google's APIs.

Keys come in either spelling. Google's Schema is converted to JSON Schema, whose types are in lower
case and have no ``nullable`` flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from bridle.proxy.dialects.body import Json, convert, writable

T = TypeVar("T")

_TYPES: Final = {
    "STRING": "string",
    "NUMBER": "number",
    "INTEGER": "integer",
    "BOOLEAN": "boolean",
    "ARRAY": "array",
    "OBJECT": "object",
    "NULL": "null",
}
_DROPPED: Final = frozenset({"propertyOrdering", "nullable", "type"})
_COUNTS: Final = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
)
"""Keywords whose 64-bit integers Protocol buffers write as strings."""


def camel_keys(fields: Json) -> Json:
    """Return ``fields`` with its own keys in camel case.

    Google's APIs accept ``system_instruction`` as well as ``systemInstruction``.
    """
    if not any("_" in name for name in fields):
        return fields
    return {_camel(name): value for name, value in fields.items()}


def google(value: Json, kind: type[T], field: str) -> T:
    """Return ``value`` with keys in either spelling as a ``kind``. Raise ``ApiError`` (400)."""
    return convert(camel_keys(value), kind, field)


def json_schema(schema: Json, field: str) -> Json:
    """Return ``schema``, which stands in ``field``, as JSON Schema throughout."""
    return _converted(writable(schema, field))


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word[:1].upper() + word[1:] for word in rest) if head else name


def _converted(schema: Mapping[str, Any]) -> Json:
    given = {_camel(name): value for name, value in schema.items()}
    converted: Json = {}
    kind = given.get("type")
    if isinstance(kind, str) and kind != "TYPE_UNSPECIFIED":
        converted["type"] = _TYPES.get(kind, kind)
        if given.get("nullable") is True:
            converted["type"] = [converted["type"], "null"]
    elif isinstance(kind, list):
        converted["type"] = [
            _TYPES.get(name, name) if isinstance(name, str) else name for name in kind
        ]
    for name, value in given.items():
        if name not in _DROPPED:
            converted[name] = _value(name, value)
    if converted.get("format") == "enum":
        # Google's own word for a string with an ``enum``; engines refuse formats that they do not
        # know.
        del converted["format"]
    if given.get("nullable") is True:
        for name, null in (("enum", None), ("anyOf", {"type": "null"})):
            choices = converted.get(name)
            if isinstance(choices, list) and null not in choices:
                converted[name] = [*choices, null]
    return converted


def _value(name: str, value: Any) -> Any:
    if name in ("items", "additionalProperties") and isinstance(value, dict):
        return _converted(value)
    if name in ("properties", "defs", "$defs") and isinstance(value, dict):
        return {
            key: _converted(inner) if isinstance(inner, dict) else inner
            for key, inner in value.items()
        }
    if name in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
        return [_converted(inner) if isinstance(inner, dict) else inner for inner in value]
    if name in _COUNTS and isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value[:18])
    return value
