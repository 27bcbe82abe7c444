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
from sqlalchemy import inspect, text

from bridle.store.errors import StoreUnavailable
from bridle.store.reading.queries import Reader
from bridle.store.records import DEFAULT_POLICY, PolicyRecord, RewardSource, Sampler
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
from bridle.store.schema.tables import metadata
from bridle.store.schema.views import create_views, drop_views


def differences(url):
    engine = connect(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        found = compare_metadata(context, metadata)
    engine.dispose()
    return found


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
            "INSERT INTO rewards (id, session_id, name, value, source, detail, created_at)"
            " VALUES ('r', 'gone', 'x', 1, 'operator', '{}', 1)"
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
FIRST_RELEASE = Path(__file__).parent / "data" / "written_by_0200.json.gz"
RELEASES = sorted((Path(__file__).parent / "data").glob("written_by_*.json.gz"))


@pytest.mark.parametrize("kept", RELEASES, ids=lambda path: path.name.split(".")[0])
def test_what_every_release_wrote_is_read_back_exactly(url, kept):
    """``tests/store/released.py`` keeps a store of each release."""
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
    with Reader(url) as reader:
        (session,) = reader.sessions()
        sources = {reward.source for reward in reader.rewards(session.id)}
    if kept.name == "written_by_0200.json.gz":
        assert sources == {RewardSource.UNATTESTED}, "nothing shows who wrote them"
    with transaction(engine) as connection:
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM messages").scalar() >= 8
    engine.dispose()


def test_all_that_was_published_before_there_were_several_policies_is_the_default_ones(url):
    stored = json.loads(gzip.decompress(FIRST_RELEASE.read_bytes()))
    published = {"path": None, "digest": "d", "verified": 1, "logprob_gap": 1e-5}
    stored["rows"]["policies"] = [
        {"run_id": "run_1", "version": version, "published_at": 3.0, **published}
        for version in (1, 2**40)
    ]
    emptied(url)
    released.restore(url, stored)
    migrate(url)
    with Reader(url) as reader:
        found = reader.policies("run_1", DEFAULT_POLICY)
        asked = [call.policy for one in reader.sessions() for call in reader.calls(one.id)]
    assert [policy.version for policy in found] == [1, 2**40]
    assert found[0] == PolicyRecord(
        "run_1", 1, 3.0, digest="d", verified=True, logprob_gap=1e-5, name="policy"
    )
    assert asked == [None] * 4


def test_calls_of_the_first_release_get_the_sampler_that_they_asked_for(url):
    stored = json.loads(gzip.decompress(FIRST_RELEASE.read_bytes()))
    asked, shaped = [row["id"] for row in stored["rows"]["calls"]][:2]
    for row in stored["rows"]["calls"]:
        row["sampling"] = json.dumps({"temperature": 0.7, "top_k": 64, "max_tokens": 9})
        row["notes"] = None
        if row["id"] == shaped:
            row["notes"] = json.dumps([{"name": "constrained_by_grammar", "detail": "tool_choice"}])
    counts = {row["id"]: row["sampled_tokens"] for row in stored["rows"]["calls"]}
    assert counts[asked]
    assert counts[shaped]
    emptied(url)
    released.restore(url, stored)
    migrate(url)
    with Reader(url) as reader:
        samplers = {
            call.id: call.sampler
            for session in reader.sessions()
            for call in reader.calls(session.id)
        }
    assert samplers[asked] == Sampler("raw", temperature=0.7, top_k=64)
    assert samplers[shaped] == Sampler("raw", temperature=0.7, top_k=64, grammar="tool_choice")


def test_findings_of_guards_that_were_rewards_become_findings(url):
    stored = json.loads(gzip.decompress(FIRST_RELEASE.read_bytes()))
    emptied(url)
    released.restore(url, stored)
    engine = connect(url)
    with transaction(engine) as connection:
        for name in ("guard:git_history", "reward", "guard:"):
            connection.execute(
                text(
                    "INSERT INTO rewards (id, session_id, name, value, source, detail, created_at)"
                    " VALUES (:name, 'session_a', :name, 3.0, 'verifier', '{}', 90.0)"
                ),
                {"name": name},
            )
    engine.dispose()
    migrate(url)
    with Reader(url) as reader:
        found = {one.name: (one.kind, one.mode) for one in reader.rewards("session_a")[-3:]}
    assert found == {
        "git_history": ("finding", "warn"),
        "reward": ("score", None),
        "guard:": ("score", None),
    }
