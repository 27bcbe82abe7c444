import asyncio
import gzip
import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import JSON, Boolean, MetaData, inspect, text

from bridle.store.encoding.vocabulary import Vocabulary
from bridle.store.errors import StoreUnavailable
from bridle.store.operations.deliveries import Deliveries
from bridle.store.reading.queries import Reader
from bridle.store.records import ServedPolicy, TaskRecord
from bridle.store.schema.database import (
    connect,
    database_url,
    migrate,
    newest_revision,
    revision,
    shown,
    transaction,
)
from bridle.store.schema.tables import metadata
from bridle.store.writing.writer import Writer


def differences(url):
    engine = connect(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        found = compare_metadata(context, metadata)
    engine.dispose()
    return found


def tables(url):
    engine = connect(url)
    names = set(inspect(engine).get_table_names())
    engine.dispose()
    return names


def shape(url):
    """Tables, columns, keys and indexes as the database tells them, in no order."""
    engine = connect(url)
    found = inspect(engine)
    shapes = {
        table: {
            "columns": sorted(
                (column["name"], str(column["type"]), column["nullable"], column["default"])
                for column in found.get_columns(table)
            ),
            "primary key": found.get_pk_constraint(table),
            "foreign keys": sorted(map(str, found.get_foreign_keys(table))),
            "unique": sorted(map(str, found.get_unique_constraints(table))),
            "indexes": sorted(
                (index["name"], index["column_names"], index["unique"], where(index))
                for index in found.get_indexes(table)
            ),
        }
        for table in found.get_table_names()
    }
    engine.dispose()
    return shapes


def where(index):
    conditions = (
        str(value) for name, value in index["dialect_options"].items() if name.endswith("_where")
    )
    return [re.sub(r"[()]|::\w+( varying)?", "", condition) for condition in conditions]


def back_to(url, number):
    migrate(url, f"-{int(revision(url)) - number}")
    assert revision(url) == f"{number:04}"


def test_the_migrations_build_exactly_the_schema(url):
    at_once = shape(url)
    assert differences(url) == []
    migrate(url, "base")
    assert tables(url) <= {"alembic_version"}
    for number in range(1, int(newest_revision()) + 1):
        migrate(url, f"{number:04}")
    assert differences(url) == []
    assert shape(url) == at_once


def test_what_is_built_can_be_taken_down_and_built_again(url):
    migrate(url, "base")
    migrate(url)
    assert differences(url) == []
    assert revision(url) == newest_revision()


def test_migrating_twice_changes_nothing(url):
    migrate(url)
    assert differences(url) == []


def test_alembic_is_loaded_only_when_there_is_something_to_migrate(tmp_path):
    program = (
        "import sys; from bridle.store.schema.database import migrate, revision;"
        "migrate('s.db'); migrate('s.db'); revision('s.db'); print('alembic' in sys.modules)"
    )
    environment = dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "False"


def test_processes_that_start_together_migrate_once(url):
    migrate(url, "base")
    errors = []

    def go():
        try:
            migrate(url)
        except Exception as error:  # noqa: BLE001 - shown by the assertion
            errors.append(error)

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert differences(url) == []


def test_migrating_works_from_any_folder(tmp_path):
    program = "from bridle.store.schema.database import migrate; migrate('deep/er/bridle.db')"
    environment = dict(os.environ)
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=environment)
    assert (tmp_path / "deep" / "er" / "bridle.db").exists()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("/data/bridle.db", "sqlite:////data/bridle.db"),
        ("sqlite:///x.db", "sqlite:///x.db"),
        ("postgres://u@h/d", "postgresql+psycopg://u@h/d"),
        ("postgresql://u@h/d", "postgresql+psycopg://u@h/d"),
        ("postgresql+psycopg://u@h/d", "postgresql+psycopg://u@h/d"),
    ],
)
def test_addresses_are_read_as_people_write_them(given, meant):
    assert database_url(given).render_as_string(hide_password=False) == meant


def test_what_consumers_had_acknowledged_is_kept_as_deliveries(url):
    """Until 0002 it was in the ``config`` of each consumer's run."""
    migrate(url, "base")
    migrate(url, "0001")
    engine = connect(url)
    state = {"position": [2.0, "session_b"], "done": ["session_d"]}
    with engine.begin() as connection:
        for number, name in enumerate("abcd", start=1):
            connection.execute(
                text(
                    "INSERT INTO sessions (id, continuation, settings, labels, created_at,"
                    " sealed_at) VALUES (:id, 'exact', '{}', '{}', 0, :at)"
                ),
                {"id": f"session_{name}", "at": float(number)},
            )
        connection.execute(
            text(
                "INSERT INTO runs (id, kind, name, config, started_at, status)"
                " VALUES ('feed:trl', 'feed', 'trl', :state, 0, 'running')"
            ),
            {"state": json.dumps(state)},
        )
    migrate(url)
    found = Deliveries(engine).lease("trl", 9, 60)
    left = Deliveries(engine).lease("verl", 9, 60)
    engine.dispose()
    assert found.sessions == ("session_c",)
    assert left.sessions == tuple(f"session_{name}" for name in "abcd")


WRITTEN = Path(__file__).parent / "data" / "written_by_0003.json.gz"
"""Rows as the last version before 0004 wrote them, and its calls as that version read them."""


def restore(url, rows):
    """Puts rows that were kept as JSON into the tables as they are."""
    engine = connect(url)
    found = MetaData()
    found.reflect(engine)
    with transaction(engine) as connection:
        for name, kept in rows.items():
            table = found.tables[name]
            values = [
                {key: plain(value, table.c[key].type) for key, value in row.items()} for row in kept
            ]
            connection.execute(table.insert(), values)
    engine.dispose()


def plain(value, kind):
    if isinstance(value, dict):
        return bytes.fromhex(value["bytes"])
    if isinstance(kind, JSON):
        return json.loads(value)
    return bool(value) if isinstance(kind, Boolean) else value


def read(url):
    """Everything that is told of every call, as plain values."""
    found = {}
    with Reader(url) as reader:
        for session in reader.sessions():
            for call in reader.calls(session.id):
                answered, known = call.response_body_id, call.prompt_tokens
                found[call.id] = {
                    "status": call.status.value,
                    "request": reader.request_body(call.id).decode(),
                    "response": reader.response_body(call.id).decode() if answered else None,
                    "message": dict(call.message),
                    "conversation": dict(call.conversation),
                    "prompt": None if known is None else reader.prompt_token_ids(call.id).tolist(),
                    "sampled": [
                        [choice.token_ids.tolist(), choice.logprobs.tobytes().hex()]
                        for choice in reader.sampled(call.id)
                    ],
                    "headers": dict(call.headers),
                    "usage": dict(call.usage),
                }
    return found


def test_what_older_versions_wrote_is_read_back_exactly(url):
    kept = json.loads(gzip.decompress(WRITTEN.read_bytes()))
    migrate(url, "base")
    migrate(url, "0003")
    restore(url, kept["rows"])
    migrate(url)
    assert read(url) == kept["calls"]
    # ... goes down to what that version wrote, and comes up again.
    back_to(url, 3)
    migrate(url)
    assert read(url) == kept["calls"]


def test_an_older_store_is_written_on(url, calls):
    kept = json.loads(gzip.decompress(WRITTEN.read_bytes()))
    migrate(url, "base")
    migrate(url, "0003")
    restore(url, kept["rows"])
    migrate(url)
    with Reader(url) as reader, Writer(url, vocabulary=Vocabulary([b" a", b" b", b" c"])) as writer:
        session = next(reader.sessions())
        last = reader.calls(session.id)[-2]
        body = reader.request_body(last.id)[:-2] + b'{"role":"user","content":"and now?"}]}'
        prompt = [*reader.prompt_token_ids(last.id), 1, 2]
        begun = calls.begun(session, request_body=body, parent_call_id=last.id)
        writer.begin_call(begun)
        writer.end_call_sync(calls.ended(begun, prompt, [1, 2], version=3))
        assert reader.request_body(begun.id) == body
        assert reader.prompt_token_ids(begun.id).tolist() == prompt


@pytest.mark.parametrize("vocabulary", [None, Vocabulary([b" a", b" b", b" c"])])
def test_text_stored_as_tokens_goes_down_and_up_again(url, calls, vocabulary):
    with Writer(url, vocabulary=vocabulary) as writer:
        for marker in ("one", "two"):
            session, parent, prompt = calls.session(), None, [0, 1]
            writer.create_session_sync(session)
            history = '{"messages":["' + marker * 200
            for turn in range(4):
                history += f'","turn {turn} a b c'
                begun = calls.begun(
                    session, request_body=(history + '"]}').encode(), parent_call_id=parent
                )
                writer.begin_call(begun)
                if turn < 3 or marker == "one":
                    writer.end_call_sync(
                        calls.ended(begun, prompt, [1, 2], conversation={"tail": [history]})
                    )
                prompt, parent = [*prompt, 1, 2, turn], begun.id
    before = read(url)
    assert len(before) == 8
    back_to(url, 3)
    migrate(url)
    assert read(url) == before


def test_what_engines_serve_outlives_the_column_for_their_marks(url):
    """Without the mark nothing is compared; the version is still known."""
    told = ServedPolicy("http://engine", 7, None, 1.0, "weights")
    with Writer(url) as writer:
        asyncio.run(writer.record_served(told))
    with Reader(url) as reader:
        assert reader.served() == {told.engine: told}
    back_to(url, 4)
    migrate(url)
    with Reader(url) as reader:
        assert reader.served() == {told.engine: replace(told, weights_fingerprint=None)}


def test_tasks_of_one_id_are_apart_and_the_last_is_left_to_an_older_version(url, calls):
    tasks = [
        TaskRecord("1", "shop", "train", {"n": 1}, 1.0),
        TaskRecord("1", "maths", "train", {"n": 2}, 3.0),
        TaskRecord("1", "shop", "eval", {"n": 3}, 2.0),
        TaskRecord("2", "shop", "train", {"n": 4}, 1.0),
    ]
    with Writer(url) as writer:
        writer.upsert_task(*tasks)
        for task in tasks:
            named = {"task_suite": task.suite, "task_split": task.split, "task_id": task.id}
            writer.create_session_sync(calls.session(**named, created_at=task.created_at))
        writer.create_session_sync(calls.session(created_at=4.0))

    def asked():
        with Reader(url) as reader:
            found = [reader.task_of(session) for session in reader.sessions()]
        return sorted(task.payload["n"] for task in found if task), found.count(None)

    assert asked() == ([1, 2, 3, 4], 1)
    back_to(url, 5)
    migrate(url)
    assert asked() == ([2, 2, 2, 4], 1)


def test_a_store_whose_rows_have_lost_their_owner_is_not_migrated(tmp_path):
    url = str(tmp_path / "s.db")
    migrate(url)
    back_to(url, 5)
    with closing(sqlite3.connect(url)) as database, database:
        database.execute("INSERT INTO rewards VALUES ('r', 'gone', NULL, 1, 'x', 1, NULL, '{}', 1)")
    with pytest.raises(StoreUnavailable, match=r"^rows of rewards lost what they belong to"):
        migrate(url)
    assert revision(url) == "0005"
    with closing(sqlite3.connect(url)) as database, database:
        database.execute("DELETE FROM rewards")
    migrate(url)
    assert revision(url) == newest_revision()


def test_a_store_of_a_newer_version_is_left_as_it_is(url):
    engine = connect(url)
    with transaction(engine) as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    engine.dispose()
    with pytest.raises(StoreUnavailable, match=r"a newer Bridle's: its schema is 9999"):
        migrate(url)
    assert revision(url) == "9999"


def test_an_address_is_shown_without_its_password():
    assert shown("postgresql://u:secret@h/d") == "postgresql+psycopg://u:***@h/d"
    assert shown("/data/a b.db") == "/data/a b.db"
