"""A value that cannot be read costs its own session alone; no command ends with a traceback.

Every column of every table is damaged in turn, in the rows of two sessions: by a text that is no
UTF-8, and by a word where something else belongs.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from bridle.bench.gallery import fill
from bridle.cli.program import app
from bridle.store.reading.queries import Reader
from bridle.store.schema.tables import metadata
from bridle.viewer.app import viewer_app
from bridle.viewer.rendering import Source

COLUMNS = [
    (table.name, column.name)
    for table in metadata.sorted_tables
    for column in table.c
    # SQLite takes nothing but numbers there.
    if not (column.primary_key and table.name in ("search_documents", "search_words"))
]
NO_TEXT = "CAST(x'ff7bfe' AS TEXT)"
A_WORD = "'{word'"
OF_A_SESSION = {
    "sessions": "id = ?",
    "calls": "session_id = ?",
    **dict.fromkeys(("tool_sets", "rewards", "leases", "token_fates"), "session_id = ?"),
    **dict.fromkeys(
        ("call_messages", "call_kinds", "spans", "bodies"),
        "call_id IN (SELECT id FROM calls WHERE session_id = ?)",
    ),
}
KEY_OF = "SELECT name FROM pragma_table_info(?) WHERE pk > 0 ORDER BY pk"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A store of sessions of every sort, and their ids, oldest first."""
    store = tmp_path_factory.mktemp("recorded") / "whole.db"
    sessions = fill(str(store), 6, turns=3)
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    return store, sessions


def damaged(store: Path, table: str, column: str, sessions: list[str]) -> int:
    """Damages the column in rows of the first two sessions; returns how many rows that were."""
    changed = 0
    with closing(sqlite3.connect(store, isolation_level=None)) as connection:
        for session, value in zip(sessions, (NO_TEXT, A_WORD), strict=False):
            where = OF_A_SESSION.get(table)
            key = ", ".join(one for (one,) in connection.execute(KEY_OF, (table,)))
            chosen = f"SELECT {key} FROM {table} WHERE {where or 'TRUE'} LIMIT 1"  # noqa: S608
            update = f"UPDATE {table} SET {column} = {value} WHERE ({key}) IN ({chosen})"  # noqa: S608
            given = (session,) if where else ()
            changed += connection.execute(update, given).rowcount
    return changed


@pytest.fixture
def copy(recorded: tuple[Path, list[str]], tmp_path: Path) -> Path:
    path = tmp_path / "copy.data"
    shutil.copyfile(recorded[0], path)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(("table", "column"), COLUMNS, ids=[f"{t}.{c}" for t, c in COLUMNS])
def test_no_damaged_value_costs_more_than_its_session(recorded, copy, tmp_path, table, column):
    sessions = recorded[1]
    if not damaged(copy, table, column, sessions):
        pytest.skip(f"no row of {table}")
    others = sessions[2:]

    def run(*command: str) -> str:
        found = CliRunner().invoke(app, [*command, "--store", str(copy)])
        assert found.exception is None or isinstance(found.exception, SystemExit), (
            command,
            found.exception,
        )
        assert "Traceback" not in found.output
        return found.output

    listed = json.loads(run("sessions", "--json"))
    run("sessions")
    assert {row["id"] for row in listed} >= set(others)
    account = json.loads(run("audit", "--json"))
    assert {violation["session"] for violation in account["violations"]}.isdisjoint(others)
    for session in sessions[:3]:
        run("show", session)
    exported = tmp_path / "all.jsonl"
    run("export", str(exported), "--force")
    run("export", str(tmp_path / "all.parquet"), "--force")
    with Reader(str(copy)) as reader:
        client = TestClient(viewer_app(Source(reader, str(copy), str)))
        pages = ["/", "/groups", "/runs", "/audit", *(f"/runs/{run.id}" for run in reader.runs())]
        for session in sessions[:3]:
            page = f"/sessions/{session}"
            pages += [page, f"{page}/tree", f"{page}/audit", f"{page}/turns/1/tokens"]
        for page in pages:
            status = client.get(page).status_code
            assert status in (200, 404), page
            assert status == 200 or sessions[2] not in page, page


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("sessions", "labels"),
        ("calls", "headers"),
        ("calls", "status"),
        ("call_messages", "tool_calls"),
        ("spans", "token_ids"),
        ("rewards", "value"),
    ],
)
def test_what_cannot_be_read_is_named_and_left_out(recorded, copy, tmp_path, table, column):
    sessions = recorded[1]
    assert damaged(copy, table, column, sessions) == 2
    command = ["audit", "--json", "--store", str(copy)]
    audited = CliRunner().invoke(app, command)
    assert audited.exit_code == 1
    violations = json.loads(audited.output)["violations"]
    named = {row["session"] for row in violations if column in row["detail"]}
    assert named == set(sessions[:2])
    exported = tmp_path / "all.jsonl"
    command = ["export", str(exported), "--json", "--store", str(copy)]
    report = json.loads(CliRunner().invoke(app, command).output)
    assert report["left_out"]["session_broken"] >= 2
    shown = CliRunner().invoke(app, ["show", sessions[0], "--store", str(copy)])
    assert f"column {column}" in " ".join(shown.output.split())
