"""Column types of the schema."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    String,
    Text,
)
from sqlalchemy.types import TypeDecorator, TypeEngine

from bridle.store.declaration import Stored, is_word, stored

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


def columns(*owners: type) -> list[Column[Any]]:
    """Return the columns of the facts of these classes.

    ``Column.info`` has each one's field, under ``"stored"``.
    """
    return [
        Column(
            one.name,
            _type(one),
            *(() if one.fact.references is None else (ForeignKey(one.fact.references),)),
            primary_key=one.fact.key,
            nullable=one.nullable and not one.fact.key,
            unique=one.fact.unique or None,
            info={"stored": one},
        )
        for one in stored(*owners)
    ]


def _type(one: Stored) -> TypeEngine[Any]:
    fact = one.fact
    if one.is_json:
        return PlainJson
    if fact.digest:
        return Digest(fact.size)
    if one.kind is str or is_word(one.kind):
        return Text() if fact.size is None else String(fact.size)
    if one.kind is bytes or fact.codec is not None:
        return LargeBinary(fact.size)
    if one.kind is bool:
        return Boolean()
    if one.kind is float:
        return Float(53)
    return BigInteger() if fact.big else Integer()


class Undecodable(bytes):
    """A text of the database that is not valid UTF-8."""


def decoded(text: bytes) -> str | Undecodable:
    """Decode a text of SQLite.

    Return the bytes of one that is not valid UTF-8, because an error would end the whole query.
    """
    try:
        return text.decode()
    except UnicodeDecodeError:
        return Undecodable(text)
