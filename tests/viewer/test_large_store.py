"""Pages of a store with many calls: they read sums, and no page reads all calls or messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event
from sqlalchemy.engine import Engine

from bridle.bench.gallery import fill
from bridle.bench.large_store import fill_store
from bridle.bench.pages import _addresses, _client
from bridle.diagnosis.findings import findings_of_run
from bridle.store.reading import totals
from bridle.store.reading.queries import Reader

READS_ALL = re.compile(r"SCAN (calls|call_messages|call_kinds|spans|bodies|turns)\b")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("large") / "store.data")
    fill_store(path, 2_000, lambda _: None)
    Path(path).chmod(0o600)
    return path


@pytest.fixture
def plans() -> Iterator[dict[str, list[str]]]:
    """The plan of each statement that SQLite executes."""
    found: dict[str, list[str]] = {}

    def explain(connection: Connection, cursor: Any, statement: str, given: Any, *_: Any) -> None:
        if statement.startswith(("SELECT", "WITH")) and statement not in found:
            own = cursor.connection.cursor()
            rows = own.execute(f"EXPLAIN QUERY PLAN {statement}", given).fetchall()
            found[statement] = [row[3] for row in rows]

    event.listen(Engine, "before_cursor_execute", explain)
    yield found
    event.remove(Engine, "before_cursor_execute", explain)


def test_no_page_reads_all_calls(store: str, plans: dict[str, list[str]]) -> None:
    with _client(store) as client:
        pages, searches = _addresses(client)
        for name, address in {**pages, **searches}.items():
            plans.clear()
            assert client.get(address).status_code == 200, name
            assert plans, name
            for statement, plan in plans.items():
                scans = [line for line in plan if READS_ALL.search(line)]
                assert not scans, f"{name}: {scans} in {statement}"


def test_lists_are_ordered_and_filtered_by_sums(store: str, plans: dict[str, list[str]]) -> None:
    with _client(store) as client:
        client.get("/sessions?order=tokens")
        client.get("/sessions?status=failed")
    used = " ".join(line for plan in plans.values() for line in plan)
    assert "session_totals" in used
    assert "ix_session_counts_name" in used


def test_the_pages_of_a_run_read_the_sums_of_its_own_sessions(
    store: str, plans: dict[str, list[str]]
) -> None:
    with _client(store) as client:
        pages, _ = _addresses(client)
        plans.clear()
        for name in ("run", "findings of the run"):
            assert client.get(pages[name]).status_code == 200
    with Reader(store) as reader:
        findings_of_run(reader, pages["run"].rpartition("/")[2], most=5)
    used = {statement: " ".join(plan) for statement, plan in plans.items()}
    for statement, plan in used.items():
        assert "GROUP BY" not in statement or "ix_session_counts_name (name=?)" not in plan
    account, newest = (plan for plan in used.values() if "session_fates" in plan)
    assert "ix_session_fates_account (account=?)" in account
    assert "SEARCH session_fates USING PRIMARY KEY (session_id=?)" in newest


def test_many_sessions_without_sums_are_counted_like_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "bridle.db")
    fill(path, 40, turns=3)
    with Reader(path) as reader:
        runs = [run.id for run in reader.runs()]
        few = [findings_of_run(reader, run, most=5) for run in runs]
        monkeypatch.setattr(totals, "_LISTED", 0)
        assert [findings_of_run(reader, run, most=5) for run in runs] == few
    assert any(few)
