"""PostgreSQL has the types and comments that people who query it expect."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from tests.store.conftest import Postgres

from bridle.store.call import CallBegun, CallEnded
from bridle.store.reading.activity import activity
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus, Note, SessionRecord
from bridle.store.schema.columns import storable_json
from bridle.store.schema.database import migrate
from bridle.store.schema.tables import metadata
from bridle.store.schema.views import turn_columns
from bridle.store.writing.writer import Writer

Rows = Callable[..., list[tuple[object, ...]]]

KEPT_AS_WRITTEN = {
    ("call_messages", "content_json"),
    ("call_messages", "tool_calls"),
    ("tasks", "payload"),
    ("tool_sets", "definitions"),
}
"""Columns of JSON whose order of keys counts."""


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        (r'{"a":"\u0000"}', r'{"a":"\ufffd"}'),
        (r'{"a":"\u0000\u0000 \\\u0000"}', r'{"a":"\ufffd\ufffd \\\ufffd"}'),
        (r'{"a":"\\u0000 and \\\\u0000"}', r'{"a":"\\u0000 and \\\\u0000"}'),
        ('{"a":"u0000"}', '{"a":"u0000"}'),
    ],
)
def test_a_nul_character_is_replaced_and_what_looks_like_one_is_not(text: str, stored: str) -> None:
    assert storable_json(text) == stored


@pytest.fixture
def url(postgres: Postgres) -> str:
    address = postgres.empty_database()
    migrate(address)
    return address


@pytest.fixture
def rows(url: str) -> Rows:
    def query(sql: str, *values: object) -> list[tuple[object, ...]]:
        with psycopg.connect(url, autocommit=True) as server:
            return server.execute(sql, values).fetchall()

    return query


@pytest.mark.postgres
def test_every_time_is_a_timestamp_and_json_can_be_indexed(rows: Rows) -> None:
    types = {
        (str(table), str(column)): str(kind)
        for table, column, kind in rows(
            "SELECT table_name, column_name, data_type FROM information_schema.columns"
            " WHERE table_schema = 'public'"
        )
    }
    times = {name for name in types if name[1].endswith("_at") or name[1] in ("at", "until")}
    assert len(times) > 15
    assert {types[name] for name in times} == {"timestamp with time zone"}
    tables = {table.name for table in metadata.sorted_tables}
    as_text = {name for name, kind in types.items() if kind == "json" and name[0] in tables}
    assert as_text == KEPT_AS_WRITTEN
    assert types["calls", "usage"] == types["sessions", "labels"] == "jsonb"


@pytest.mark.postgres
def test_declared_columns_and_the_views_have_their_meanings_as_comments(rows: Rows) -> None:
    commented = {
        (str(table), str(column)): meaning
        for table, column, meaning in rows(
            "SELECT c.relname, a.attname, col_description(c.oid, a.attnum) FROM pg_class c"
            " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0"
        )
    }
    for table in metadata.sorted_tables:
        for column in table.columns:
            if "stored" in column.info:
                assert commented[table.name, column.name] == column.info["stored"].fact.meaning
    for one in turn_columns():
        assert commented["turns", one.name] == one.meaning
    ((view,),) = rows("SELECT obj_description('turns'::regclass)")
    assert view == "A call of a session, in the order of their start"


@pytest.mark.postgres
def test_times_and_json_are_read_as_they_were_written(url: str, rows: Rows) -> None:
    at = 1_790_000_000.123456
    odd = "before\0after"
    with Writer(url) as writer, Reader(url) as reader:
        writer.add_sync(SessionRecord("ses_1", at, labels={"b": 1, "a": odd}))
        writer.begin_call(
            CallBegun(
                id="call_1",
                session_id="ses_1",
                dialect="chat",
                started_at=at + 1,
                stream=False,
                model_requested="m",
                request_body=b"{}",
                headers={"x": odd},
            )
        )
        writer.end_call_sync(
            CallEnded(
                id="call_1",
                session_id="ses_1",
                status=CallStatus.COMPLETE,
                first_token_at=at + 1.25,
                ended_at=at + 3.5,
                notes=(Note("odd", odd),),
                usage={"z": 1, "text": odd},
            )
        )
        session, (call,) = reader.session("ses_1"), reader.calls("ses_1")
        assert (session.created_at, call.started_at, call.ended_at) == (at, at + 1, at + 3.5)
        assert session.labels == {"b": 1, "a": "before\ufffdafter"}
        assert call.usage == {"z": 1, "text": "before\ufffdafter"}
        assert call.headers == {"x": "before\ufffdafter"}
        assert Note("odd", "before\ufffdafter") in call.notes
        assert activity(reader, at).slowest_s == pytest.approx(2.5)
        assert activity(reader, at + 4).calls == 0
        assert [one.id for one in reader.sessions(since=at)] == ["ses_1"]
        assert list(reader.sessions(since=at + 0.000001)) == []
    ((created, waited, text),) = rows(
        "SELECT s.created_at, t.ended_at - t.first_token_at, t.usage ->> 'text'"
        " FROM turns t JOIN sessions s ON s.id = t.session_id"
    )
    assert created == datetime.fromtimestamp(at, UTC)
    assert waited == timedelta(seconds=2.25)
    assert text == "before\ufffdafter"
    assert rows("SELECT count(*) FROM sessions WHERE created_at > now() - interval '1 hour'")


@pytest.mark.postgres
def test_sessions_of_one_moment_are_paged_without_a_gap(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridle.store.reading.queries._PAGE", 2)
    now = time.time()
    with Writer(url) as writer, Reader(url) as reader:
        writer.add_sync(*(SessionRecord(f"ses_{n}", now + n // 4 * 1e-7) for n in range(9)))
        assert [one.id for one in reader.sessions()] == [f"ses_{n}" for n in range(9)]
