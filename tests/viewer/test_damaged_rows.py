"""A value that cannot be read costs its own session alone; no command ends with a traceback.

Every column of every table is damaged, in the rows of two sessions: by a text that is no UTF-8, and
by a word where something else belongs. Up to four columns of a table are damaged at once, each in
sessions of its own.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from bridle.bench.gallery import fill
from bridle.cli.program import app
from bridle.store.reading.queries import Reader
from bridle.store.schema.tables import metadata
from bridle.store.writing.writer import Writer
from bridle.viewer.app import viewer_app
from bridle.viewer.rendering import Source
from support.trained import trained

TOGETHER = 4
"""The columns of a table that are damaged at once."""
COLUMNS = {
    table.name: [
        column.name
        for column in table.c
        # SQLite takes nothing but numbers there.
        if not (column.primary_key and table.name in ("search_documents", "search_words"))
    ]
    for table in metadata.sorted_tables
}
CASES = [
    (table, columns[at : at + TOGETHER])
    for table, columns in COLUMNS.items()
    for at in range(0, len(columns), TOGETHER)
]
NO_TEXT = "CAST(x'ff7bfe' AS TEXT)"
A_WORD = "'{word'"
OF_A_SESSION = {
    "sessions": "id = ?",
    "calls": "session_id = ?",
    **dict.fromkeys(("tool_sets", "rewards", "leases", "token_fates"), "session_id = ?"),
    **dict.fromkeys(
        ("call_messages", "call_kinds", "spans", "bodies", "trained_spans"),
        "call_id IN (SELECT id FROM calls WHERE session_id = ?)",
    ),
}
KEY_OF = "SELECT name FROM pragma_table_info(?) WHERE pk > 0 ORDER BY pk"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A store of sessions of every sort, and their ids, oldest first."""
    store = tmp_path_factory.mktemp("recorded") / "whole.db"
    sessions = fill(str(store), 2 * TOGETHER + 1, turns=3)
    with Reader(str(store)) as reader, Writer(str(store)) as writer:
        writer.add_sync(*(trained(reader, one, "run_gallery1") for one in sessions))
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    return store, sessions


def damaged(store: Path, table: str, column: str, places: list[Any]) -> int:
    """Damages the column in a row of each place; returns how many rows that were."""
    changed = 0
    where = OF_A_SESSION.get(table)
    with closing(sqlite3.connect(store, isolation_level=None)) as connection:
        for place, value in zip(places, (NO_TEXT, A_WORD), strict=False):
            key = ", ".join(one for (one,) in connection.execute(KEY_OF, (table,)))
            chosen = f"WHERE {where} LIMIT 1" if where else "LIMIT 1 OFFSET ?"
            chosen = f"SELECT {key} FROM {table} {chosen}"  # noqa: S608
            update = f"UPDATE {table} SET {column} = {value} WHERE ({key}) IN ({chosen})"  # noqa: S608
            changed += connection.execute(update, (place,)).rowcount
    return changed


def copy_of(store: Path, path: Path) -> Path:
    shutil.copyfile(store, path)
    path.chmod(0o600)
    return path


def rounds(store: Path, table: str, columns: list[str], sessions: list[str]) -> Iterator[Any]:
    """Pairs of a column and the places in which it is damaged: those of each copy of the store.

    A place is a session, of which the last one stays whole, or the number of a row in a table
    without sessions.
    """
    where = OF_A_SESSION.get(table)
    count = f"SELECT count(*) FROM {table} WHERE {where or 'TRUE'}"  # noqa: S608
    with closing(sqlite3.connect(store)) as connection:

        def rows(*session: str) -> int:
            return int(connection.execute(count, session).fetchone()[0])

        places: list[Any] = (
            [one for one in sessions[:-1] if rows(one)]
            if where
            else [*range(min(rows(), 2 * TOGETHER))]
        )
    pairs = [places[at : at + 2] for at in range(0, max(len(places) - 1, 1), 2)]
    while columns and places:
        yield list(zip(columns, pairs, strict=False))
        columns = columns[len(pairs) :]


@pytest.mark.parametrize(("table", "columns"), CASES, ids=[f"{t}.{c[0]}" for t, c in CASES])
@pytest.mark.sampled(5)
def test_no_damaged_value_costs_more_than_its_session(recorded, tmp_path, table, columns):
    store, sessions = recorded
    checked = 0
    for chosen in rounds(store, table, columns, sessions):
        copy, costs = copy_of(store, tmp_path / f"{chosen[0][0]}.data"), []
        for column, pair in chosen:
            checked += damaged(copy, table, column, pair) > 0
            costs += pair if table in OF_A_SESSION else sessions[:2]
        check(copy, costs, [one for one in sessions if one not in costs], tmp_path)
    if not checked:
        pytest.skip(f"no row of {table}")
    assert checked == len(columns)


def check(copy: Path, costs: list[str], others: list[str], tmp_path: Path) -> None:
    """Read the store in every way; ``costs`` are the damaged sessions, ``others`` the rest."""
    visited = [*dict.fromkeys(costs), others[-1]]

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
    for session in visited:
        run("show", session)
    exported = tmp_path / "all.jsonl"
    run("export", str(exported), "--force")
    run("export", str(tmp_path / "all.parquet"), "--force")
    with Reader(str(copy)) as reader:
        client = TestClient(viewer_app(Source(reader, str(copy))))
        pages = ["/", "/groups", "/runs", "/audit", *(f"/runs/{run.id}" for run in reader.runs())]
        for session in visited:
            page = f"/sessions/{session}"
            pages += [page, f"{page}/tree", f"{page}/audit", f"{page}/turns/1/tokens"]
        for page in pages:
            status = client.get(page).status_code
            assert status in (200, 404), page
            assert status == 200 or others[-1] not in page, page


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
def test_what_cannot_be_read_is_named_and_left_out(recorded, tmp_path, table, column):
    store, sessions = recorded
    copy = copy_of(store, tmp_path / "copy.data")
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


def test_damaged_scores_are_named_beside_the_tokens(recorded, tmp_path):
    store, sessions = recorded
    copy = copy_of(store, tmp_path / "scores.data")
    assert damaged(copy, "trained_spans", "entropies", [sessions[0]]) == 1
    with Reader(str(copy)) as reader:
        client = TestClient(viewer_app(Source(reader, str(copy))))
        pages = [
            client.get(f"/sessions/{sessions[0]}/turns/{number}/tokens")
            for number, call in enumerate(reader.calls(sessions[0]), start=1)
            if call.sampled_tokens
        ]
    assert {page.status_code for page in pages} == {200}
    (named,) = [page.text for page in pages if "cannot be read" in page.text]
    assert "column entropies" in named
    assert "sampled" in named
