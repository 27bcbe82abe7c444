"""Request fields that no engine can be given, and that are not dropped silently.

A field that carries history or tools, or changes what the model is asked, is carried out or
refused. Each dialect lists the fields that it refuses in one table, with the remedy; every other
unknown field is harmless and gets a note. Content that can be read is sent as text
(:func:`as_text`).

An upstream that speaks the client's dialect gets the client's own bytes and carries out or refuses
such fields itself. A request for it is read inside :func:`carried_upstream`, only for the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from bridle.proxy.dialects.body import Json, invalid, json_text

_carried: Final = ContextVar("carried", default=False)


@contextmanager
def carried_upstream() -> Iterator[None]:
    """Read requests and replies without refusing what only an upstream can carry out."""
    before = _carried.set(True)
    try:
        yield
    finally:
        _carried.reset(before)


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
        if name not in fields or _carried.get():
            continue
        value = fields[name]
        if not is_empty(value) and not field.harmless(value):
            raise invalid(place + name, f"is not carried out here; {field.remedy}")


def refuse_kind(kind: str, table: Mapping[str, str], field: str) -> None:
    """Raise ``ApiError`` (400) if ``kind`` is in the ``table`` of kinds and remedies.

    The ``kind`` is that of the value in ``field``.
    """
    if kind in table and not _carried.get():
        raise invalid(field, f"{kind} is not carried out here; {table[kind]}")


def unreadable(field: str, problem: str, content: Any) -> str:
    """Return the text that stands in the record for content that an upstream reads.

    Raise ``ApiError`` (400) with the ``problem`` if nobody reads it.
    """
    if not _carried.get():
        raise invalid(field, problem)
    digest = sha256(json_text(content, field).encode()).hexdigest()
    return f"[content that is not in the record: sha256 {digest[:16]}]"


def as_text(kind: str, value: Any, field: str) -> str:
    """Return a part of a conversation as text that the model can read.

    The part is one that has no place in chat.
    """
    return f"<{kind}>\n{json_text(value, field)}\n</{kind}>"
