"""Column types of the schema."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import JSON, Dialect, LargeBinary
from sqlalchemy.types import TypeDecorator

PlainJson: Final = JSON(none_as_null=True)
"""JSON text. ``None`` is SQL's NULL, not the JSON text ``null``."""


class Digest(TypeDecorator[str]):
    """A digest: lower-case hex text in Python, its bytes in the database."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        return digest_bytes(value)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> str | None:
        if isinstance(value, bytes | memoryview):
            return bytes(value).hex()
        return value


def digest_bytes(value: str | None) -> bytes | None:
    """Return the value that :class:`Digest` binds, for statements that go to the driver directly.

    Text that is not a digest is bound as it is, so that a look-up for it finds nothing.
    """
    if value is None:
        return None
    try:
        return bytes.fromhex(value)
    except ValueError:
        return value.encode()


class Undecodable(bytes):
    """A text of the database that is not valid UTF-8."""


def decoded(text: bytes) -> str | Undecodable:
    """Decode a text of SQLite. Return the bytes of one that is not valid UTF-8, because an error
    would end the whole query."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return Undecodable(text)
