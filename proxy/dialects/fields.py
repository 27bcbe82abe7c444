"""Reading a client's JSON by name: whatever is not as it must be is a 400 that names the field."""

from __future__ import annotations

import math
from typing import Any, Final

import orjson

from bridle.proxy.wire.canonical import ApiError

_INT64: Final = 2**63


def invalid(where: str, problem: str) -> ApiError:
    """The error for a field that cannot be used, to be raised."""
    return ApiError("invalid_request", f"{where}: {problem}", status=400, param=where)


def decode_object(body: bytes) -> Fields:
    """The request body as an object."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(
            "invalid_request", f"The request body is not valid JSON: {error}", status=400
        ) from None
    if not isinstance(data, dict):
        raise ApiError("invalid_request", "The request body must be a JSON object.", status=400)
    return Fields(data, "")


def json_text(value: Any, where: str) -> str:
    """``value`` as compact JSON text; too deep a nesting is the client's error, not ours."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise invalid(where, f"cannot be written as JSON ({error})") from None


def writable(value: Any, where: str) -> Any:
    """``value`` itself, once it is certain that it can be sent on as JSON."""
    if not embeddable(value):
        raise invalid(where, "is nested too deeply, or holds a number that JSON writers refuse")
    return value


def embeddable(value: Any) -> bool:
    """Whether ``value`` can be written as a part of a larger JSON text. The writer's limit on
    nesting is met a little early, for the levels around it."""
    try:
        orjson.dumps([[[[[[[[[[[[value]]]]]]]]]]]])
    except orjson.JSONEncodeError:
        return False
    return True


class Fields:
    """A JSON object and where it stands in the request. ``null`` and absent mean the same."""

    __slots__ = ("data", "where")

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    @classmethod
    def of(cls, value: Any, where: str) -> Fields:
        if not isinstance(value, dict):
            raise invalid(where, "must be an object")
        return cls(value, where)

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def raw(self, name: str) -> Any:
        return self.data.get(name)

    def string(self, name: str) -> str | None:
        value = self.data.get(name)
        if value is None or isinstance(value, str):
            return value
        raise invalid(self.path(name), "must be a string")

    def need_string(self, name: str) -> str:
        value = self.string(name)
        if value is None:
            raise invalid(self.path(name), "is required and must be a string")
        return value

    def boolean(self, name: str) -> bool | None:
        value = self.data.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise invalid(self.path(name), "must be true or false")

    def integer(self, name: str) -> int | None:
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and -_INT64 <= value < _INT64:
            return value
        raise invalid(self.path(name), "must be a 64-bit integer")

    def number(self, name: str) -> float | None:
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise invalid(self.path(name), "must be a number")

    def items(self, name: str) -> list[Any]:
        """The list under ``name``; empty when absent."""
        value = self.data.get(name)
        if value is None:
            return []
        if isinstance(value, list):
            return value
        raise invalid(self.path(name), "must be a list")

    def objects(self, name: str) -> list[Fields]:
        """The list of objects under ``name``; empty when absent."""
        where = self.path(name)
        return [Fields.of(item, f"{where}[{i}]") for i, item in enumerate(self.items(name))]

    def strings(self, name: str) -> tuple[str, ...]:
        """The list of strings under ``name``; a single string counts as a list of one."""
        value = self.data.get(name)
        if isinstance(value, str):
            return (value,)
        items = self.items(name)
        for i, item in enumerate(items):
            if not isinstance(item, str):
                raise invalid(f"{self.path(name)}[{i}]", "must be a string")
        return tuple(items)

    def child(self, name: str) -> Fields | None:
        """The object under ``name``."""
        value = self.data.get(name)
        return None if value is None else Fields.of(value, self.path(name))
