from dataclasses import replace

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError

from bridle.store.errors import NotFound, StoreUnavailable
from bridle.store.reading.queries import Reader
from bridle.store.records import RunRecord, TaskRecord
from bridle.store.schema.database import connect, transaction
from bridle.store.schema.tables import spans
from bridle.store.writing.rows import OBSERVED


@pytest.fixture
def filled(writer, calls):
    writer.add_sync(RunRecord("run_a", "rollout", 1.0))
    writer.add_sync(
        TaskRecord("t1", "shop", "train", {"n": 1}, 1.0),
        TaskRecord("t2", "shop", "eval", {"n": 2}, 1.0),
        TaskRecord("t1", "shop", "eval", {"n": 3}, 1.0),
        TaskRecord("t1", "maths", "train", {"n": 4}, 1.0),
    )
    made = []
    for number in range(10):
        session = calls.session(
            created_at=float(number // 2),
            run_id="run_a" if number % 2 else None,
            task_suite="shop",
            task_split="eval" if number % 2 else "train",
            task_id=f"t{1 + number % 2}",
            group_id=f"g{number % 3}",
            harness="codex" if number < 5 else "pi",
            sealed_at=1.0 if number < 3 else None,
            outcome="completed" if number < 3 else None,
        )
        writer.add_sync(session)
        made.append(session)
    return made


def test_a_task_is_its_suites_and_splits_own(filled, reader):
    assert [reader.task_of(session).payload["n"] for session in filled[:2]] == [1, 2]
    elsewhere = replace(filled[0], task_suite="maths")
    assert reader.task_of(elsewhere).payload["n"] == 4
    assert reader.task_of(replace(filled[0], task_split="test")) is None


def test_anonymous_sessions_are_found_without_looking_through_the_others(
    writer, reader, calls, tmp_path
):
    for number in range(6):
        named = {"name": f"n{number}"} if number % 3 else {}
        keyed = {"key_hash": f"k{number}"} if number == 3 else {}
        session = calls.session(**named, **keyed, created_at=float(number), sealed_at=None)
        writer.add_sync(session)
    plans = []

    def explain(connection, cursor, statement, parameters, *_):
        if connection.dialect.name == "sqlite" and not statement.startswith("EXPLAIN"):
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            plans.extend(row[-1] for row in cursor.fetchall())

    event.listen(reader.engine, "before_cursor_execute", explain)
    (found,) = reader.sessions(sealed=False, anonymous=True, newest_first=True, limit=64)
    assert found.created_at == 0.0
    assert [plan for plan in plans if "USING INDEX ix_sessions_anonymous" not in plan] == []


@pytest.mark.parametrize(
    ("filters", "numbers"),
    [
        ({}, range(10)),
        ({"run": "run_a"}, [1, 3, 5, 7, 9]),
        ({"group": "g0"}, [0, 3, 6, 9]),
        ({"task": "t1", "harness": "pi"}, [6, 8]),
        ({"split": "eval"}, [1, 3, 5, 7, 9]),
        ({"sealed": True}, [0, 1, 2]),
        ({"sealed": False, "harness": "codex"}, [3, 4]),
        ({"outcome": "completed"}, [0, 1, 2]),
        ({"since": 2.0, "until": 4.0}, [4, 5, 6, 7]),
        ({"run": "nobody"}, []),
    ],
)
def test_sessions_are_found_by_what_they_are(filled, reader, filters, numbers):
    found = list(reader.sessions(**filters))
    assert {session.id for session in found} == {filled[number].id for number in numbers}
    assert [s.created_at for s in found] == sorted(s.created_at for s in found)


@pytest.mark.parametrize("newest_first", [False, True])
def test_pages_neither_skip_nor_repeat_sessions_of_the_same_instant(
    filled, reader, monkeypatch, newest_first
):
    monkeypatch.setattr("bridle.store.reading.queries._PAGE", 3)
    found = [session.id for session in reader.sessions(newest_first=newest_first)]
    assert len(found) == 10
    assert set(found) == {session.id for session in filled}
    limited = [session.id for session in reader.sessions(newest_first=newest_first, limit=7)]
    assert limited == found[:7]


def test_a_session_is_found_by_name_and_key(writer, reader, calls):
    session = calls.session(name="mine", key_hash="abc", settings={"max_calls": 3})
    writer.add_sync(session)
    assert reader.session_by_name("mine") == session
    assert reader.session_by_key_hash("abc") == session
    assert reader.session_by_name("other") is None
    assert reader.session_by_key_hash("other") is None


def test_what_is_not_there_is_said_to_be_missing(reader):
    for ask in (reader.session, reader.call, reader.run, reader.request_body):
        with pytest.raises(NotFound):
            ask("nothing")


def test_calls_come_in_the_order_of_their_start(writer, reader, calls):
    session = calls.session()
    writer.add_sync(session)
    for started in (3.0, 1.0, 2.0):
        writer.begin_call(calls.begun(session, started_at=started))
    writer.update_session_sync(session.id, outcome=None)
    assert [call.started_at for call in reader.calls(session.id)] == [1.0, 2.0, 3.0]


@pytest.mark.damages_store
def test_a_broken_path_is_an_error_and_not_a_shorter_prompt(url, writer, reader, calls):
    session = calls.session()
    writer.add_sync(session)
    first, second = calls.begun(session), calls.begun(session)
    for call, prompt in ((first, [1, 2]), (second, [1, 2, 3, 4])):
        writer.begin_call(call)
        writer.end_call_sync(calls.ended(call, prompt, [3]))
    engine = connect(url)
    with transaction(engine) as connection:
        connection.execute(
            spans.delete().where((spans.c.call_id == first.id) & (spans.c.choice == OBSERVED))
        )
    engine.dispose()
    with pytest.raises(ValueError, match="missing parents"):
        reader.prompt_token_ids(second.id)


def test_a_reader_may_share_an_engine(url):
    engine = connect(url)
    with Reader(engine) as reader:
        assert list(reader.sessions()) == []
    with Reader(engine) as reader:
        assert reader.runs() == []
    engine.dispose()


def test_a_database_that_cannot_be_read_is_said_without_the_values_asked_for(url):
    def rename(table, name):
        with connect(url).connect() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {table} RENAME TO {name}")
            connection.commit()

    rename("sessions", "elsewhere")
    with Reader(url) as reader, pytest.raises(StoreUnavailable, match="sessions") as told:
        reader.session_by_name("my-secret-name")
    assert "my-secret-name" not in f"{told.value} {told.value.__cause__}"
    rename("elsewhere", "sessions")


def test_an_error_of_the_database_tells_no_values(url):
    with connect(url).connect() as connection, pytest.raises(DBAPIError) as told:
        connection.execute(text("SELECT * FROM nowhere WHERE name = :name"), {"name": "my-secret"})
    assert "nowhere" in str(told.value)
    assert "my-secret" not in str(told.value)
