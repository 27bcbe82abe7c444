"""Damaged rows: each value is read by itself, so that only the damaged ones are lost.

A disk, another program or a person may have changed any value. Rows of sessions, runs and the like
are read with neutral values in place of damaged ones (:func:`mended`). Calls, messages and spans
are read as they are; if that fails, :func:`damage_of` names the rows and columns at fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple

import msgspec
import orjson
from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    Integer,
    LargeBinary,
    Row,
    Select,
    Table,
    Text,
    bindparam,
    case,
    cast,
    select,
    type_coerce,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import NullType

from bridle.store.declaration import Stored
from bridle.store.encoding.packing import (
    unpack_experts,
    unpack_ids,
    unpack_kept,
    unpack_logprobs,
)
from bridle.store.errors import StoreUnavailable
from bridle.store.records import ToolCall, span_id
from bridle.store.schema.columns import Digest, Time, Undecodable
from bridle.store.schema.tables import (
    call_messages,
    calls,
    rewards,
    sessions,
    spans,
    tool_sets,
)


class RowDamage(NamedTuple):
    """A value that cannot be read."""

    table: str
    row: str
    """The row's id."""
    column: str
    problem: str

    def __str__(self) -> str:
        return f"{self.table} {self.row}: column {self.column} {self.problem}"


class DamagedRows(StoreUnavailable, ValueError):
    """Rows of a session cannot be read."""

    def __init__(self, damage: Sequence[RowDamage]) -> None:
        super().__init__("; ".join(map(str, damage)))
        self.damage = tuple(damage)


READ_ERRORS: Final = (ValueError, TypeError, LookupError, AttributeError, msgspec.MsgspecError)
"""The errors that reading a damaged row raises."""

_ROLES: Final = frozenset({"system", "user", "assistant", "tool"})
_LISTS: Final = frozenset({spans.c.versions, tool_sets.c.definitions})
_ANY_JSON: Final = frozenset({call_messages.c.content_json})
_DECODED: Final[Mapping[Column[Any], Any]] = {
    call_messages.c.tool_calls: msgspec.json.Decoder(tuple[ToolCall, ...]).decode,
    spans.c.token_ids: unpack_ids,
    spans.c.logprobs: unpack_logprobs,
    spans.c.kept: unpack_kept,
    spans.c.routed_experts: unpack_experts,
}


def as_stored(table: Table) -> list[ColumnElement[Any]]:
    """Return the table's columns without any conversion; JSON as its text, a time in seconds."""
    return [_as_stored(column) for column in table.columns]


def _as_stored(column: Column[Any]) -> ColumnElement[Any]:
    if isinstance(column.type, JSON):
        return cast(column, Text).label(column.name)
    if column.type is Time:
        return column
    return type_coerce(column, NullType()).label(column.name)


def mended(table: Table, row: Row[Any]) -> tuple[dict[str, Any], list[RowDamage]]:
    """Return the values of a row of :func:`as_stored`, and the damage.

    Neutral values stand in place of damaged ones.
    """
    values: dict[str, Any] = {}
    damage: list[RowDamage] = []
    for column, stored in zip(table.columns, row, strict=False):
        value, problem = _read(column, stored)
        values[column.name] = value
        if problem is not None:
            damage.append(RowDamage(table.name, _name(table, row), column.name, problem))
    return values, damage


def json_value(column: ColumnElement[Any], *path: str | int) -> Any:
    """Return the value at ``path`` in a column of JSON, as SQL.

    It is NULL where SQLite finds no JSON in the column, because an error would end the whole query.
    """
    found: Any = case((_is_json(column), column))
    for key in path:
        found = type_coerce(found, JSON)[key]
    return found


class _is_json(FunctionElement[bool]):
    type = Boolean()
    inherit_cache = True


@compiles(_is_json)
def _other(element: Any, compiler: Any, **_: Any) -> str:
    return "TRUE"


@compiles(_is_json, "sqlite")
def _sqlite(element: Any, compiler: Any, **given: Any) -> str:
    return f"coalesce(json_valid({compiler.process(element.clauses, **given)}), 0) = 1"


def number_or_none(value: Any) -> Any:
    """Return ``value`` if it is a number, else ``None``.

    An aggregate over damaged rows may be a text. PostgreSQL's sums of whole numbers are decimals.
    """
    if isinstance(value, Decimal):
        return int(value)
    return value if isinstance(value, int | float) else None


_SESSIONS: Final[Any] = bindparam("sessions", expanding=True)
_OWNED: Final[Sequence[tuple[Table, Select[Any]]]] = [
    (sessions, select(*as_stored(sessions)).where(sessions.c.id.in_(_SESSIONS))),
    (calls, select(*as_stored(calls)).where(calls.c.session_id.in_(_SESSIONS))),
    (tool_sets, select(*as_stored(tool_sets)).where(tool_sets.c.session_id.in_(_SESSIONS))),
    (rewards, select(*as_stored(rewards)).where(rewards.c.session_id.in_(_SESSIONS))),
    *(
        (table, select(*as_stored(table)).join(calls, calls.c.id == table.c.call_id)
         .where(calls.c.session_id.in_(_SESSIONS)))
        for table in (call_messages, spans)
    ),
]  # fmt: skip


def damage_of(connection: Connection, session_ids: Sequence[str]) -> list[RowDamage]:
    """Return every damaged value of these sessions.

    It may be in the sessions, their calls, messages, tools, spans or rewards.
    """
    return [
        each
        for table, query in _OWNED
        for row in connection.execute(query, {"sessions": list(session_ids)})
        for each in mended(table, row)[1]
    ]


class Shapes:
    """A check of the types of values in the rows of one query.

    Known combinations of types cost nothing.
    """

    def __init__(self, columns: Iterable[Any]) -> None:
        self._columns = [getattr(column, "type", None) for column in columns]
        self._known: set[tuple[type, ...]] = set()

    def check(self, row: Sequence[Any]) -> None:
        """Raise ``ValueError`` for a value of a type that its column does not have."""
        shape = tuple(map(type, row))
        if shape in self._known:
            return
        for kind, value in zip(self._columns, row, strict=True):
            if value is not None and not isinstance(value, _types(kind)):
                raise ValueError(f"a {kind} is stored as {type(value).__name__}")
        self._known.add(shape)


def _types(kind: Any) -> tuple[type, ...]:
    if isinstance(kind, Boolean):
        return (bool, int)
    if isinstance(kind, Float):
        return (float, int)
    if isinstance(kind, Integer):
        return (int,)
    if isinstance(kind, Digest):
        return (str,)
    if isinstance(kind, LargeBinary):
        return (bytes, memoryview)
    return (object,) if kind is None or isinstance(kind, NullType) else (str,)


def _read(column: Column[Any], stored: Any) -> tuple[Any, str | None]:
    if stored is None:
        return (None, None) if column.nullable else (_neutral(column), "is NULL")
    try:
        return _value(column, stored), None
    except READ_ERRORS as error:
        what = str(error).partition("\n")[0]
        return (None if column.nullable else _neutral(column)), f"cannot be read: {what}"


def _value(column: Column[Any], stored: Any) -> Any:
    """Return the decoded value. Raise one of :data:`READ_ERRORS` if it is damaged."""
    kind = column.type
    if isinstance(kind, Digest | LargeBinary):
        if not isinstance(stored, bytes | memoryview) or isinstance(stored, Undecodable):
            raise ValueError("it is no bytes")
        stored = bytes(stored)
        if (decode := _DECODED.get(column)) is not None:
            decode(stored)
        return stored.hex() if isinstance(kind, Digest) else _field(column, stored)
    text = isinstance(kind, JSON) or not isinstance(kind, Boolean | Float | Integer)
    if not isinstance(stored, (str,) if text else _types(kind)):
        raise ValueError(f"it is a value of type {type(stored).__name__}")
    if "stored" in column.info:
        return _field(column, stored)
    if isinstance(kind, JSON):
        value = orjson.loads(str(stored))
        wanted: Any = list if column in _LISTS else dict
        if column in _DECODED:
            _DECODED[column](stored)
        elif column not in _ANY_JSON and not isinstance(value, wanted):
            raise ValueError(f"it is JSON, but no {wanted.__name__}")
        return value
    if column is call_messages.c.role and stored not in _ROLES:
        raise ValueError(f"it is {str(stored)[:32]!r}")
    return bool(stored) if isinstance(kind, Boolean) else stored


def _field(column: Column[Any], stored: Any) -> Any:
    """Return the value of a declared field (``store/declaration.py``)."""
    one: Stored | None = column.info.get("stored")
    if one is None:
        return stored
    try:
        value = one.decoded(stored)
    except KeyError as error:
        raise ValueError(f"it is {str(stored)[:32]!r}") from error
    return bool(value) if one.kind is bool else value


def _neutral(column: Column[Any]) -> Any:
    kind = column.type
    one: Stored | None = column.info.get("stored")
    if one is not None and one.default is not None:
        return one.default
    if isinstance(kind, JSON):
        return [] if column in _LISTS else {}
    if isinstance(kind, Digest):
        return ""
    if isinstance(kind, LargeBinary):
        return b""
    if isinstance(kind, Boolean | Float | Integer):
        return kind.python_type(0)
    return ""


def _name(table: Table, row: Row[Any]) -> str:
    keys = [getattr(row, column.name) for column in table.primary_key]
    if table is spans and isinstance(keys[0], str) and isinstance(keys[1], int):
        return span_id(keys[0], keys[1])
    return "/".join(key if isinstance(key, str) else repr(key) for key in keys)
