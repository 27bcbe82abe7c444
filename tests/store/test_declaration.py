"""Facts that are declared once (``store/declaration.py``)."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import pytest
from sqlalchemy import Boolean, Float, Integer, String

from bridle.store.declaration import Fact, Part, stored
from bridle.store.schema.columns import Digest, PlainJson, columns


class Size(StrEnum):
    SMALL = "small"


@dataclass(frozen=True, kw_only=True)
class Thing:
    name: Annotated[str, Fact("Its name", size=8, key=True)]
    size: Annotated[Size, Fact("Its size", size=16)] = Size.SMALL
    weight: Annotated[float | None, Fact("Its weight")] = None
    whole: Annotated[bool, Fact("Whether it is whole")] = True
    extra: Annotated[dict[str, Any], Fact("What else", nullable=True)] = field(default_factory=dict)
    seen: Annotated[tuple[int, ...], Fact("Times")] = ()
    digest: Annotated[str, Fact("Its digest", size=2, digest=True)] = "00ff"
    private: int = 0


THING = Part(Thing)


def test_a_row_is_read_back_as_it_was():
    for thing in (
        Thing(name="a"),
        Thing(name="b", weight=1.5, whole=False, extra={"x": [1]}, seen=(3,), digest="abcd"),
    ):
        row = THING.row(thing)
        # The column's own type reads a digest as hex.
        read = [bytes(one).hex() if isinstance(one, bytes) else one for one in row]
        assert Thing(**THING.fields(read)) == thing


def test_an_empty_value_is_null_where_the_fact_says_so():
    row = dict(zip(THING.names, THING.row(Thing(name="a")), strict=True))
    assert (row["extra"], row["seen"], row["digest"]) == (None, "[]", b"\x00\xff")
    assert "private" not in row


def test_no_record_is_null_in_all_columns():
    assert Part(OptionalThing).row(None) == [None]


@dataclass(frozen=True, kw_only=True)
class OptionalThing:
    weight: Annotated[float | None, Fact("Its weight")] = None


def test_columns_follow_from_the_types():
    found = {column.name: column for column in columns(Thing)}
    kinds = [type(column.type) for column in found.values()]
    assert kinds == [String, String, Float, Boolean, type(PlainJson), type(PlainJson), Digest]
    assert found["name"].primary_key
    assert [name for name, column in found.items() if column.nullable] == ["weight", "extra"]
    (big,) = columns(BigThing)
    assert isinstance(big.type, Integer)


@dataclass(frozen=True, kw_only=True)
class BigThing:
    number: Annotated[int, Fact("A number", big=True)]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("size", "huge", LookupError),
        ("size", None, LookupError),
        ("extra", "[1]", msgspec.MsgspecError),
        ("seen", "{", msgspec.MsgspecError),
        ("seen", None, TypeError),
    ],
)
def test_a_damaged_value_is_refused(name, value, error):
    row = dict(zip(THING.names, THING.row(Thing(name="a")), strict=True)) | {name: value}
    with pytest.raises(error):
        THING.fields(list(row.values()))


def test_a_value_without_a_json_form_is_refused():
    with pytest.raises(TypeError, match="not JSON serializable: object"):
        THING.row(Thing(name="a", extra={"x": object()}))


def test_the_default_stands_for_a_missing_value():
    by_name = {one.name: one for one in stored(Thing)}
    assert (by_name["name"].required, by_name["name"].default) == (True, None)
    assert (by_name["extra"].default, by_name["size"].default) == ({}, Size.SMALL)
