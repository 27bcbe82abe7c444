import json
import os
import subprocess
import sys
import threading

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from store.database import connect, database_url, migrate
from store.deliveries import Deliveries
from store.schema import metadata


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


def test_the_migrations_build_exactly_the_schema(url):
    assert differences(url) == []


def test_what_is_built_can_be_taken_down_and_built_again(url):
    migrate(url, "base")
    assert tables(url) <= {"alembic_version"}
    migrate(url)
    assert differences(url) == []


def test_migrating_twice_changes_nothing(url):
    migrate(url)
    assert differences(url) == []


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
    program = "from store.database import migrate; migrate('deep/er/bridle.db')"
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
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
    assert database_url(given) == meant


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
