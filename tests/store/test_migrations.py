import gzip
import json
import os
import re
import runpy
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import delete, func, inspect, select

from bridle.store.errors import StoreUnavailable
from bridle.store.records import Conversation, Message
from bridle.store.schema import database
from bridle.store.schema.database import (
    connect,
    database_url,
    migrate,
    newest_revision,
    revision,
    shown,
    transaction,
)
from bridle.store.schema.derived import search_documents, session_totals
from bridle.store.schema.tables import metadata
from bridle.store.schema.views import create_views, drop_views
from bridle.store.writing.digest import lacking
from bridle.store.writing.writer import Writer
from support.processes import until


@pytest.fixture(autouse=True)
def new_stores_are_copies():
    """Make each store from nothing."""


def differences(url):
    engine = connect(url)
    with engine.connect() as connection:
        options = {"compare_type": True, "include_object": lambda _, name, *__: not of_search(name)}
        context = MigrationContext.configure(connection, opts=options)
        found = compare_metadata(context, metadata)
    engine.dispose()
    return found


def of_search(name):
    """Return whether it is the index of the search, which SQLAlchemy cannot declare."""
    return name is not None and name.startswith(("search_index", "ix_search_words_words"))


def shape(url):
    """Tables, columns, keys and indexes as the database reports them, in no order."""
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
    shapes["views"] = {name: found.get_view_definition(name) for name in found.get_view_names()}
    engine.dispose()
    return shapes


def where(index):
    conditions = (
        str(value) for name, value in index["dialect_options"].items() if name.endswith("_where")
    )
    return [re.sub(r"[()]|::\w+( varying)?", "", condition) for condition in conditions]


def emptied(url):
    """The database without anything of ours."""
    engine = connect(url)
    with transaction(engine) as connection:
        drop_views(connection)
        metadata.drop_all(connection)
        connection.exec_driver_sql("DROP TABLE alembic_version")
    engine.dispose()


def test_a_new_store_has_exactly_the_schema(url):
    assert differences(url) == []
    views = {"turns", "messages", "tool_calls", "scores", "token_accounts"}
    assert set(shape(url)["views"]) == views


def test_an_older_store_goes_through_the_migrations(url, monkeypatch):
    at_once = shape(url)
    engine = connect(url)
    with transaction(engine) as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    engine.dispose()
    seen = []
    monkeypatch.setattr(
        database, "upgrade", lambda connection: seen.append(inspect(connection).get_view_names())
    )
    migrate(url)
    assert seen == [[]], "the views are out of the way of the migrations"
    assert shape(url) == at_once


def test_a_store_of_the_first_release_gets_the_scores_of_trained_tokens(url):
    at_once = shape(url)
    engine = connect(url)
    with transaction(engine) as connection:
        connection.exec_driver_sql("DROP TABLE trained_spans")
        without_last_documents(connection)
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0300'")
    engine.dispose()
    migrate(url)
    assert shape(url) == at_once
    assert differences(url) == []


def without_last_documents(connection):
    for statement in (
        "DROP INDEX ix_search_documents_session_id_last",
        "ALTER TABLE search_documents DROP COLUMN last",
        "CREATE INDEX ix_search_documents_session_id ON search_documents (session_id)",
    ):
        connection.exec_driver_sql(statement)


def test_an_older_store_keeps_the_index_of_its_texts(url, calls):
    with Writer(url) as writer:
        sessions = [calls.session(sealed_at=1.0) for _ in range(2)]
        for session in sessions:
            writer.add_sync(session)
            said = Conversation((Message("user", "word " * 9_000),), length=1)
            begun = calls.begun(session.id, conversation=said)
            writer.begin_call(begun)
            writer.end_call_sync(calls.ended(begun, [1, 2], [3, 4]))
        until(lambda: not writer.digesting)
    engine = connect(url)
    with transaction(engine) as connection:
        connection.execute(
            delete(session_totals).where(session_totals.c.session_id == sessions[1].id)
        )
        without_last_documents(connection)
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0301'")
    migrate(url)
    with engine.connect() as connection:
        assert lacking(connection) == [sessions[1].id]
        own = search_documents.c
        marked = select(own.session_id, func.count(), func.count(own.last)).group_by(own.session_id)
        assert {tuple(row) for row in connection.execute(marked)} == {
            (sessions[0].id, 3, 1),
            (sessions[1].id, 3, 0),
        }
    engine.dispose()


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
    emptied(url)
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


def test_a_store_whose_rows_have_lost_their_owner_is_not_migrated(tmp_path, monkeypatch):
    url = str(tmp_path / "s.db")
    migrate(url)
    with closing(sqlite3.connect(url)) as database, database:
        database.execute(
            "INSERT INTO rewards (id, session_id, name, value, source, kind, detail, created_at)"
            " VALUES ('r', 'gone', 'x', 1, 'operator', 'score', '{}', 1)"
        )
        database.execute("UPDATE alembic_version SET version_num = '0000'")
    monkeypatch.setattr("alembic.command.upgrade", lambda *_: None)
    with pytest.raises(StoreUnavailable, match=r"^rows of rewards lost what they belong to"):
        migrate(url)
    assert revision(url) == "0000"


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


released = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("released.py"))))
RELEASES = sorted(released.DATA.glob("written_by_*.json.gz"))


@pytest.mark.parametrize("kept", ["this version", *RELEASES], ids=lambda kept: Path(kept).name)
def test_what_every_release_wrote_is_read_back_exactly(url, kept):
    """``tests/store/released.py`` keeps a store of each release."""
    if kept == "this version":
        stored = json.loads(json.dumps(released.kept()))
    else:
        stored = json.loads(gzip.decompress(kept.read_bytes()))
    at_once = shape(url)
    emptied(url)
    released.restore(url, stored)
    engine = connect(url)
    if revision(url) == newest_revision():
        with transaction(engine) as connection:
            create_views(connection)
    migrate(url)
    assert revision(url) == newest_revision()
    assert shape(url) == at_once
    assert released.read(url) == stored["read"]
    with transaction(engine) as connection:
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM messages").scalar() >= 8
    engine.dispose()


def test_a_store_from_before_the_first_release_is_refused_as_it_is(url):
    engine = connect(url)
    with transaction(engine) as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0206'")
    engine.dispose()
    with pytest.raises(StoreUnavailable, match=r"its schema is 0206, from before the first"):
        migrate(url)
    assert revision(url) == "0206"
    assert set(shape(url)["views"]) >= {"turns", "messages"}
