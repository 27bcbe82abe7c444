"""A client's JSON body as typed structs.

:func:`decode` decodes the body once, and :func:`convert` checks it against the dialect's struct.
Parts that come in many kinds (content blocks, items, tools) stay dictionaries there and are
converted one by one, with :func:`convert` or :func:`typed`. Every mismatch raises an
:class:`ApiError` (400) that names the field, so the worst result of any body is a refusal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Final, TypeVar

import msgspec
import orjson

from bridle.proxy.wire.canonical import ApiError, Request, Sampling
from bridle.proxy.wire.histories import Known, Parsed, Reading, cut, extended, is_marked

T = TypeVar("T")
Json = dict[str, Any]

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Integers that the JSON writer of every engine's client can write."""
Integral = Int64 | float
"""An integer that a client may write as ``8.0``; :func:`integer` checks it."""
Count = Annotated[int, msgspec.Meta(ge=1, le=128)]

_SAMPLING: Final = frozenset(Sampling.__struct_fields__)
_INTEGERS: Final = frozenset({"top_k", "max_tokens", "seed", "n"})
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")


def invalid(field: str, problem: str) -> ApiError:
    """Return the error for a field that cannot be used, to be raised."""
    return ApiError("invalid_request", f"{field}: {problem}", status=400, param=field)


def decode(body: bytes) -> Json:
    """Return the fields of ``body``, which must be a JSON object. Raise :class:`ApiError` (400)."""
    try:
        return msgspec.json.decode(body, type=Json)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = f"the request body is not a valid JSON object: {error}"
    except RecursionError:
        problem = "the request body is nested too deeply"
    raise ApiError("invalid_request", problem, status=400, param=_undecodable(body))


class _Head(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None


def _head(body: bytes) -> _Head:
    try:
        return msgspec.json.decode(body, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Head()


def model_of(body: bytes) -> str | None:
    """Return the model that a body names, or ``None``."""
    return _head(body).model


def asks_for_stream(body: bytes) -> bool:
    return bool(_head(body).stream)


def read_on(
    body: bytes, key: str, known: Known, parse: Callable[[Json, Reading], Request]
) -> Parsed:
    """Return the request of a body whose messages are the array of that ``key``.

    ``parse`` makes it from the decoded fields, and passes the array to the reading that it gets.
    The body may go on from those that are ``known``. Raise :class:`ApiError`.
    """
    if (found := cut(body, key, known)) is not None:
        with suppress(ApiError):  # the whole body shows where the fault is
            fields = decode(found.rest)
            if is_marked(fields, key):
                reading = Reading(found.before)
                request = parse(fields, reading)
                history = extended(body, key, found, reading)
                return Parsed(request, history, found.repeats(body))
    reading = Reading()
    request = parse(decode(body), reading)
    return Parsed(request, extended(body, key, None, reading))


def convert(value: Any, kind: type[T], field: str = "") -> T:
    """Return ``value``, which stands in ``field``, as a ``kind``. Raise :class:`ApiError` (400)."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message = str(error)
    place, missing = _PLACE.search(message), _MISSING.search(message)
    path = f"{field}.{place.group(1)}" if place else field
    if missing:
        raise invalid(f"{path}.{missing.group(1)}".lstrip("."), "Field required")
    raise invalid(path.lstrip(".").replace(".[", "["), _PLACE.sub("", message))


def typed(
    value: Json, kind: type[T], required: Mapping[str, tuple[str, ...]], field: str
) -> tuple[str, T | None]:
    """Return the type of ``value``, and ``value`` as a ``kind`` if ``required`` has that type.

    Its entry names the fields that must be there. Raise :class:`ApiError` (400).
    """
    name = type_of(value, field)
    needed = required.get(name)
    if needed is None:
        return name, None
    for part in needed:
        if value.get(part) is None:
            raise invalid(f"{field}.{part}", "Field required")
    return name, convert(value, kind, field)


def type_of(value: Json, field: str) -> str:
    """Return the ``type`` of ``value``. Raise :class:`ApiError` (400) when it is not a string."""
    kind = value.get("type")
    if not isinstance(kind, str):
        raise invalid(f"{field}.type", "is required and must be a string")
    return kind


def unknown(fields: Json, known: frozenset[str]) -> Json:
    """Return the ``fields`` that are not ``known`` and not null."""
    return {
        name: value for name, value in fields.items() if value is not None and name not in known
    }


def integer(value: int | float | None, field: str) -> int | None:
    """Return ``value`` as an integer. Raise :class:`ApiError` (400) when it has a fraction."""
    if isinstance(value, float):
        if not value.is_integer() or abs(value) >= 2**63:
            raise invalid(field, "must be a 64-bit integer")
        return int(value)
    return value


def sampling(wire: msgspec.Struct, place: str = "") -> Sampling:
    """Return the sampling parameters among the fields of ``wire``, which stands at ``place``.

    Raise :class:`ApiError` (400).
    """
    given: Json = {}
    for name, shown in zip(wire.__struct_fields__, wire.__struct_encode_fields__, strict=True):
        if name in _SAMPLING and (value := getattr(wire, name)) is not None:
            if name == "stop":
                value = strings(value)
            elif name in _INTEGERS:
                value = integer(value, place + shown)
            given[name] = value
    return Sampling(**given)


def strings(value: str | list[str] | None) -> tuple[str, ...]:
    """Return a list of strings, for which clients may also send a single one."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def json_text(value: Any, field: str) -> str:
    """Return ``value`` as compact JSON text.

    Raise :class:`ApiError` (400) when it is nested too deeply to be written.
    """
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise invalid(field, "is nested too deeply") from None


def writable(value: T, field: str) -> T:
    """Return ``value`` itself. Raise :class:`ApiError` (400) unless it can be sent on as JSON."""
    if not embeddable(value):
        raise invalid(field, "is nested too deeply, or holds a number that JSON writers refuse")
    return value


def embeddable(value: Any) -> bool:
    """Return whether ``value`` can be written as a part of a larger JSON text.

    The twelve levels around it are more than any engine request has.
    """
    try:
        orjson.dumps([[[[[[[[[[[[value]]]]]]]]]]]])
    except orjson.JSONEncodeError:
        return False
    return True


def _undecodable(body: bytes) -> str | None:
    """Return the name of the field whose value cannot be decoded.

    Return ``None`` if the body as a whole cannot be decoded.
    """
    name = None
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        for name, value in _RAW_FIELDS.decode(body).items():  # noqa: B007
            msgspec.json.decode(value)
        name = None
    return name
