"""Which session names are free, asked beside the writer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.store.operations.free_names import FreeNames
from bridle.store.records import SessionRecord
from bridle.store.schema.database import connect, migrate
from bridle.store.writing.writer import Writer


@pytest.fixture
def url(tmp_path: Path) -> str:
    migrate(str(tmp_path / "bridle.db"))
    return str(tmp_path / "bridle.db")


@pytest.fixture
def names(url: str) -> Iterator[FreeNames]:
    engine = connect(url)
    names = FreeNames(engine)
    yield names
    names.close()
    engine.dispose()


def test_a_name_is_free_until_another_connection_has_committed_it(
    url: str, names: FreeNames
) -> None:
    assert "run" in names
    with Writer(url) as writer:
        writer.create_session_sync(SessionRecord(id="ses_1", created_at=1.0, name="run"))
        assert "run" not in names
    assert "other" in names


def test_no_name_is_free_while_the_store_cannot_tell(url: str, names: FreeNames) -> None:
    rename(url, "sessions", "away")
    assert "run" not in names
    rename(url, "away", "sessions")
    assert "run" in names


def rename(url: str, table: str, to: str) -> None:
    engine = connect(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE {table} RENAME TO {to}")
    engine.dispose()
