"""Commands that copy a store or delete from it, and the benches' figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Bridle = Callable[..., Result]


def sessions(bridle: Bridle, store: str | Path) -> list[str]:
    return [
        row["name"] for row in json.loads(bridle("sessions", "--store", store, "--json").stdout)
    ]


def test_a_backup_is_a_store_of_its_own(
    bridle: Bridle, store: str, recorded: str, tmp_path: Path
) -> None:
    file = tmp_path / "backup.db"
    made = json.loads(bridle("backup", file, "--store", store, "--json").stdout)
    assert made["bytes"] == file.stat().st_size
    assert sessions(bridle, file) == [recorded]
    again = bridle("backup", file, "--store", store)
    assert again.exit_code == 1
    assert "exists already" in again.stderr


def test_a_backup_makes_the_folders_on_its_way(bridle: Bridle, store: str, tmp_path: Path) -> None:
    file = tmp_path / "of" / "today" / "backup.db"
    assert bridle("backup", file, "--store", store).exit_code == 0
    assert sessions(bridle, file) == []


def test_a_backup_that_cannot_be_written_is_said_in_a_line(
    bridle: Bridle, store: str, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("mine")
    file = tmp_path / "notes" / "of" / "backup.db"
    refused = bridle("backup", file, "--store", store)
    assert refused.exit_code == 1
    assert refused.stderr == f"bridle: {file} cannot be written: Not a directory\n"
    unwritable = bridle("backup", "/proc/backup.db", "--store", store)
    assert unwritable.exit_code == 1
    assert unwritable.stderr.startswith("bridle: /proc/backup.db cannot be written: ")


def test_a_store_is_exported_and_imported_whole(
    bridle: Bridle, store: str, recorded: str, tmp_path: Path
) -> None:
    there, back = tmp_path / "there.db", tmp_path / "back.db"
    assert json.loads(bridle("export-db", there, "--store", store, "--json").stdout)["calls"] == 2
    assert bridle("import-db", there, "--store", back).exit_code == 0
    assert sessions(bridle, back) == [recorded]
    refused = bridle("import-db", there, "--store", back)
    assert refused.exit_code == 1
    assert "already holds" in refused.stderr


def test_forget_deletes_the_session_and_only_on_a_yes(
    bridle: Bridle, store: str, recorded: str
) -> None:
    assert bridle("forget", recorded, "--store", store).exit_code == 1
    assert sessions(bridle, store) == [recorded]
    gone = json.loads(bridle("forget", recorded, "--store", store, "--yes", "--json").stdout)
    assert (gone["sessions"], gone["calls"]) == (1, 2)
    assert sessions(bridle, store) == []


def test_forget_by_age_leaves_what_is_young(bridle: Bridle, store: str, recorded: str) -> None:
    bridle("forget", "--older-than", "1", "--store", store, "--yes")
    assert sessions(bridle, store) == [recorded]
    bridle("forget", "--older-than", "0", "--store", store, "--yes")
    assert sessions(bridle, store) == []


def test_forget_wants_to_be_told_what(bridle: Bridle, store: str, recorded: str) -> None:
    assert bridle("forget", "--store", store).exit_code == 1


@pytest.mark.loop
@pytest.mark.sampled(0)
def test_the_store_takes_no_more_than_twelve_bytes_a_token(bridle: Bridle) -> None:
    found = json.loads(bridle("bench", "store", "--turns", "10", "--json").stdout)
    assert found["bytes_per_token"]["10"] <= 12
    assert found["commits_per_s"]["sqlite"] > 0
    assert found["synchronous"] == "FULL"


def test_the_bench_of_reconstruction_counts_every_token(bridle: Bridle) -> None:
    found = json.loads(bridle("bench", "reconstruct", "--sessions", "5", "--json").stdout)
    assert (found["sessions"], found["tokens"]) == (5, 5 * 10 * 600)
    assert found["tokens_per_s"] > 0
    assert found["peak_rss_mb"] > 0
