"""Request fields that no engine can be given, and that are not dropped silently.

A field that carries history or tools, or changes what the model is asked, is carried out or
refused. Each dialect lists the fields that it refuses in one table, with the remedy; every other
unknown field is harmless and gets a note. Content that can be read is sent as text
(:func:`as_text`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bridle.proxy.dialects.body import Json, invalid, json_text


def is_empty(value: Any) -> bool:
    """Return whether the value asks for nothing."""
    return value is None or value is False or value == "" or value == [] or value == {}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that is refused."""

    remedy: str
    """The alternative for the client, as part of the error's message."""
    harmless: Callable[[Any], bool] = is_empty
    """A function that returns whether a value of the field asks for nothing that is missing
    here."""


def refuse(fields: Json, table: Mapping[str, Unsupported], place: str = "") -> None:
    """Raise ``ApiError`` (400) for the first of ``fields`` that asks for something unsupported.

    Such a field is in the ``table`` with a value that asks for something. The fields stand at
    ``place``.
    """
    for name, field in table.items():
        if name not in fields:
            continue
        value = fields[name]
        if not is_empty(value) and not field.harmless(value):
            raise invalid(place + name, f"is not carried out here; {field.remedy}")


def refuse_kind(kind: str, table: Mapping[str, str], field: str) -> None:
    """Raise ``ApiError`` (400) if ``kind`` is in the ``table`` of kinds and remedies.

    The ``kind`` is that of the value in ``field``.
    """
    if kind in table:
        raise invalid(field, f"{kind} is not carried out here; {table[kind]}")


def as_text(kind: str, value: Any, field: str) -> str:
    """Return a part of a conversation as text that the model can read.

    The part is one that has no place in chat.
    """
    return f"<{kind}>\n{json_text(value, field)}\n</{kind}>"
