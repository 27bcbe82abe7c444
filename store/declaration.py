"""Facts, each named once: a field of a record, its column, its codec and its meaning.

A field is annotated with a :class:`Fact`, and everything that has the field follows from it: the
column of the table, the row that is written, the value that is read, the SQL view, the control
API's JSON and the reference page. The type of the field gives the column's type and the codec
between both:

=====================  ==========================================================
type of the field      column
=====================  ==========================================================
``str``                text, of at most ``size`` characters
``int``, ``float``     a number; ``bool`` a truth value
``float`` (``time``)   seconds since the epoch; ``timestamptz`` in PostgreSQL
``bytes``              bytes, of at most ``size``
a ``StrEnum``          its word
anything else          JSON text; ``jsonb`` in PostgreSQL
=====================  ==========================================================

A field that may be ``None`` has a column that may be NULL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Final, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

SHORT_TEXT: Final = 128
"""Maximum characters of a name that a person or program chooses, such as that of a task, a harness
or a reward."""


class Codec(NamedTuple):
    """The two ways between a field's value and that of its column.

    Both raise ``ValueError``, ``LookupError`` or :class:`msgspec.MsgspecError` for a value that is
    none.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Fact:
    """The annotation of a field that is stored in a column of its name."""

    meaning: str
    """One sentence for people, without its full stop."""
    _: KW_ONLY
    size: int | None = None
    """Maximum characters or bytes of the column."""
    big: bool = False
    """True if the number may need more than 32 bits."""
    time: bool = False
    """True if the number is a time, in seconds since the epoch."""
    digest: bool = False
    """True if the text is a digest in hex, whose bytes are stored."""
    key: bool = False
    """True if the column is (part of) the primary key."""
    unique: bool = False
    references: str | None = None
    """The column ``TABLE.NAME`` whose values the column has."""
    nullable: bool = False
    """True if an empty value (``{}``, ``()``) is stored as NULL."""
    shown: bool = True
    """True if the SQL view of the table and the control API show the column."""
    codec: Codec | None = None
    """The codec, if the type does not give it."""


class Stored(NamedTuple):
    """A field with its column."""

    name: str
    kind: Any
    """The type of the field, without ``None``."""
    fact: Fact
    nullable: bool
    codec: Codec | None
    """``None`` if the value is stored as it is."""
    required: bool
    """True if the field has no default."""
    default: Any
    """The default of the field, or ``None``."""

    @property
    def is_json(self) -> bool:
        own = self.fact.codec is not None or self.fact.digest
        return self.codec is not None and not own and not is_word(self.kind)

    def decoded(self, value: Any) -> Any:
        """Return the field's value for one of its column that is not NULL."""
        return value if self.codec is None else self.codec.decode(value)


@cache
def stored(*owners: type) -> tuple[Stored, ...]:
    """Return the stored fields of the classes, in the order in which they are written down."""
    found: dict[str, Stored] = {}
    for owner in owners:
        hints = get_type_hints(owner, include_extras=True)
        for base in owner.__mro__:
            for name in vars(base).get("__annotations__", ()):
                if name not in found and (one := _stored(owner, name, hints[name])) is not None:
                    found[name] = one
    return tuple(found.values())


def is_word(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, StrEnum)


class Part:
    """The columns of some classes' facts, as a part of a row."""

    def __init__(self, *owners: type) -> None:
        self.facts = stored(*owners)
        self.names = tuple(one.name for one in self.facts)
        self._owned = [_values(owner) for owner in owners]
        self._codecs = [
            (at, one.name, one.nullable, one.is_json, one.codec)
            for at, one in enumerate(self.facts)
            if one.codec is not None
        ]

    def row(self, *records: object) -> list[Any]:
        """Return the driver's values of the columns, given a record of each class.

        ``None`` in place of a record stands for NULL in all of its columns.
        """
        row: list[Any] = []
        for (values, nulls), record in zip(self._owned, records, strict=True):
            row += nulls if record is None else values(record)
        for at, _, nullable, is_json, codec in self._codecs:
            value = row[at]
            if nullable and not value:
                row[at] = None
            else:
                value = codec.encode(value)
                row[at] = str(value, "utf-8") if is_json else value
        return row

    def fields(self, row: Sequence[Any]) -> dict[str, Any]:
        """Return the fields of a row that begins with the columns.

        JSON is its text there. A NULL of a column with a codec is left out, because it stands for
        the field's default. Raise as :class:`Codec` does, and ``TypeError``, for a damaged value.
        """
        fields = dict(zip(self.names, row, strict=False))
        for _, name, nullable, _, codec in self._codecs:
            value = fields[name]
            if value is None and nullable:
                del fields[name]
            else:
                fields[name] = codec.decode(value)
        return fields


def _values(owner: type) -> tuple[Callable[[Any], tuple[Any, ...]], tuple[None, ...]]:
    """Return the function that gets the stored values of a record, and as many NULLs."""
    names = [one.name for one in stored(owner)]
    return attrgetter(*names), (None,) * len(names)


def _stored(owner: type, name: str, hint: Any) -> Stored | None:
    if get_origin(hint) is not Annotated:
        return None
    kind, *notes = get_args(hint)
    found = next((note for note in notes if isinstance(note, Fact)), None)
    if found is None:
        return None
    parts = get_args(kind)
    optional = type(None) in parts
    if optional:
        (kind,) = (part for part in parts if part is not type(None))
    codec = _DIGEST if found.digest else found.codec or _codec(kind)
    default = _default(owner, name)
    shown = None if default is MISSING else default
    nullable = optional or found.nullable
    return Stored(name, kind, found, nullable, codec, default is MISSING, shown)


def _default(owner: type, name: str) -> Any:
    field = getattr(owner, "__dataclass_fields__", {}).get(name)
    if field is None:
        return MISSING
    return field.default if field.default_factory is MISSING else field.default_factory()


_PLAIN: Final = (str, int, float, bool, bytes)
_DIGEST: Final = Codec(bytes.fromhex, str)
"""The codec of a digest, which the column's own type reads as hex."""


def _codec(kind: Any) -> Codec | None:
    if kind in _PLAIN:
        return None
    if is_word(kind):
        return Codec(attrgetter("_value_"), {word.value: word for word in kind}.__getitem__)
    return Codec(_encode, msgspec.json.Decoder(kind).decode)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return sorted(value)
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


_encode: Final = msgspec.json.Encoder(enc_hook=_plain).encode
