"""Column types of the schema.

Each type has one form in Python, and in each database the type that people query there: a time is a
number of seconds in SQLite and ``timestamptz`` in PostgreSQL, JSON is text in SQLite and ``jsonb``
in PostgreSQL. Statements convert times in PostgreSQL, which keeps microseconds.
"""

from __future__ import annotations

import re
from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    BindParameter,
    Boolean,
    Column,
    ColumnElement,
    Dialect,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    String,
    Text,
    cast,
    extract,
    func,
    type_coerce,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from bridle.store.declaration import Stored, is_word, stored

WrittenJson: Final = JSON(none_as_null=True)
"""JSON text, as it was written: with its order of keys. ``None`` is SQL's NULL, not the JSON text
``null``."""
PlainJson: Final = JSON(none_as_null=True).with_variant(
    postgresql.JSONB(none_as_null=True), "postgresql"
)
"""JSON whose order of keys means nothing. PostgreSQL cannot store a NUL character in it
(:func:`storable_json`)."""


class _TimestampTz(TypeDecorator[float]):
    """PostgreSQL's ``timestamptz``, which statements convert from and to seconds."""

    impl = postgresql.TIMESTAMP(timezone=True)
    cache_ok = True

    def bind_expression(self, bindparam: BindParameter[float]) -> ColumnElement[Any]:
        seconds = type_coerce(bindparam, Float(53))
        return func.to_timestamp(seconds, type_=self)

    def column_expression(self, column: ColumnElement[float]) -> ColumnElement[Any]:
        return cast(extract("epoch", column), Float(53))


Time: Final = Float(53).with_variant(_TimestampTz(), "postgresql")
"""A time, in seconds since the epoch."""


class seconds_between(FunctionElement[float]):
    """The seconds from one time to a later one, as SQL: ``seconds_between(earlier, later)``."""

    type = Float(53)
    inherit_cache = True


@compiles(seconds_between)
def _difference(element: Any, compiler: Any, **options: Any) -> str:
    earlier, later = (compiler.process(one, **options) for one in element.clauses)
    return f"({later} - {earlier})"


@compiles(seconds_between, "postgresql")
def _interval(element: Any, compiler: Any, **options: Any) -> str:
    difference = _difference(element, compiler, **options)
    return f"CAST(EXTRACT(epoch FROM {difference}) AS DOUBLE PRECISION)"


class unindexed(FunctionElement[Any]):
    """A column that SQLite does not look up in an index of its own: ``unindexed(column)``.

    Without statistics SQLite may read all rows of a value where few rows of a session are wanted.
    """

    inherit_cache = True


@compiles(unindexed)
def _column(element: Any, compiler: Any, **options: Any) -> str:
    return str(compiler.process(element.clauses, **options))


@compiles(unindexed, "sqlite")
def _unary_plus(element: Any, compiler: Any, **options: Any) -> str:
    return f"+{_column(element, compiler, **options)}"


_ESCAPED_NUL: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def storable_json(text: str) -> str:
    """Return JSON text that ``jsonb`` takes: U+FFFD stands for each NUL character."""
    return _ESCAPED_NUL.sub(r"\1\\ufffd", text) if "\\u0000" in text else text


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
            comment=one.fact.meaning,
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
        return Time if fact.time else Float(53)
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
