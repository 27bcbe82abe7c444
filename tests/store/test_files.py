"""The file of an SQLite store: refused where it is another's, and whole when its writer stops.

It is its owner's alone.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from bridle.store.errors import StoreUnavailable
from bridle.store.operations.copying import backup
from bridle.store.reading.queries import Reader
from bridle.store.records import RunRecord
from bridle.store.schema import files
from bridle.store.schema.database import migrate, refuse_newer
from bridle.store.schema.files import APPLICATION_ID, check_file
from bridle.store.writing.writer import Writer
from support.processes import until


@pytest.fixture(autouse=True)
def new_stores_are_copies():
    """Make each store from nothing."""


def other_program(path: Path, *, wal: bool = False, identity: int = 0) -> Path:
    with closing(sqlite3.connect(path)) as made:
        if wal:
            made.execute("PRAGMA journal_mode=WAL")
        made.execute(f"PRAGMA application_id={identity}")
        made.execute("CREATE TABLE users (name TEXT)")
        made.execute("CREATE TABLE alembic_version (version_num TEXT)")
        made.execute("INSERT INTO alembic_version VALUES ('zzzz')")
        made.commit()
    return path


def text_file(path: Path) -> Path:
    path.write_text("dear diary, " * 20)
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


NO_STORES = {
    "another program's tables": other_program,
    "another program's log": lambda path: other_program(path, wal=True),
    "another program's id": lambda path: other_program(path, identity=77),
    "a text": text_file,
    "a folder": folder,
    "a pipe": fifo,
}


@pytest.mark.parametrize("make", NO_STORES.values(), ids=NO_STORES)
@pytest.mark.parametrize("use", [migrate, Reader, Writer], ids=["migrate", "read", "write"])
def test_what_is_no_store_is_refused_and_left_as_it_is(tmp_path, make, use):
    path = make(tmp_path / "other.data")
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StoreUnavailable, match=r"other\.data .*--store"):
        use(str(path))
    assert before is None or path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["other.data"]


def test_an_empty_database_holds_no_store_for_readers_and_becomes_one(tmp_path):
    path = tmp_path / "new.db"
    path.touch(0o600)
    with Reader(str(path)) as reader, pytest.raises(StoreUnavailable, match="no store yet"):
        refuse_newer(reader.engine)
    migrate(str(path))
    with Reader(str(path)) as reader:
        refuse_newer(reader.engine)


def test_a_store_of_an_earlier_release_is_known_by_its_tables_and_marked(tmp_path):
    path = tmp_path / "old.db"
    migrate(str(path))
    with closing(sqlite3.connect(path)) as old:
        old.execute("PRAGMA application_id=0")
    Reader(str(path)).close()
    migrate(str(path))
    with closing(sqlite3.connect(path)) as new:
        assert new.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)


def test_the_files_of_a_store_are_their_owners_alone(tmp_path, calls, audit_store):
    before = os.umask(0o022)
    try:
        path = tmp_path / "made" / "for" / "it" / "bridle.db"
        migrate(str(path))
        with Writer(str(path)) as writer:
            writer.add_sync(calls.session())
            made = sorted(path.parent.iterdir())
            assert [file.name for file in made] == ["bridle.db", "bridle.db-shm", "bridle.db-wal"]
            assert {file.stat().st_mode & 0o777 for file in made} == {0o600}
        backup(str(path), tmp_path / "copies" / "monday.db")
    finally:
        os.umask(before)
    assert (tmp_path / "copies" / "monday.db").stat().st_mode & 0o777 == 0o600
    folders = [tmp_path / "made", tmp_path / "made" / "for", path.parent, tmp_path / "copies"]
    assert {each.stat().st_mode & 0o777 for each in folders} == {0o700}


def test_a_store_that_others_may_read_is_warned_of_once_and_not_changed(tmp_path, caplog):
    path = tmp_path / "bridle.db"
    migrate(str(path))
    assert not caplog.records
    path.chmod(0o644)
    for _ in range(2):
        Reader(str(path)).close()
    (warning,) = caplog.messages
    assert f"chmod 600 {path}" in warning
    assert path.stat().st_mode & 0o777 == 0o644


def sessions_in_a_copy(path: Path) -> int:
    """Count the sessions in the main file without the files beside it."""
    copy = path.with_name("copy.db")
    shutil.copyfile(path, copy)
    copy.chmod(0o600)
    try:
        with Reader(str(copy)) as reader:
            return len(list(reader.sessions()))
    finally:
        for file in path.parent.glob("copy.db*"):
            file.unlink()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    migrate(str(tmp_path / "bridle.db"))
    return tmp_path / "bridle.db"


def test_a_writer_that_stops_leaves_the_file_whole_though_others_have_it_open(store, calls):
    with Reader(str(store)) as reader, Writer(str(store)) as other:
        other.add_sync(calls.session())
        with Writer(str(store)) as writer:
            writer.add_sync(calls.session())
        assert len(list(reader.sessions())) == 2
        assert sessions_in_a_copy(store) == 2
        assert store.with_name("bridle.db-wal").stat().st_size == 0


def test_a_reader_that_stood_in_the_writers_way_makes_the_file_whole_when_it_closes(store, calls):
    with Reader(str(store)) as reader, reader.engine.connect() as held, held.begin():
        held.exec_driver_sql("SELECT count(*) FROM sessions").all()
        with Writer(str(store)) as writer:
            writer.add_sync(calls.session())
        assert sessions_in_a_copy(store) == 0, "or this test holds nothing back"
    assert sessions_in_a_copy(store) == 1


def test_a_quiet_writer_moves_its_log_into_the_file(store, calls, monkeypatch):
    monkeypatch.setattr("bridle.store.writing.writer._QUIET_S", 0.05)
    with Writer(str(store)) as writer, Reader(str(store)):
        writer.add_sync(calls.session())
        until(lambda: sessions_in_a_copy(store) > 0)


def test_a_store_that_was_moved_keeps_its_log(store, calls):
    """The content of the log belongs to the moved file, not to the file that is there now."""
    writer = Writer(str(store)).start()
    writer.add_sync(calls.session())
    store.rename(store.with_name("moved.db"))
    writer.close()
    assert store.with_name("bridle.db-wal").stat().st_size > 0


def test_a_checkpoint_that_cannot_be_made_is_no_error(tmp_path):
    with closing(sqlite3.connect(tmp_path / "a.db")) as closed:
        pass
    assert files.checkpoint(closed) is False


def test_a_check_of_the_file_leaves_the_locks_of_this_process(tmp_path: Path) -> None:
    """The lock keeps another process from being the last one, which removes the log at its end."""
    path = tmp_path / "bridle.db"
    migrate(str(path))
    another = (
        "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT id FROM runs').close()"
    )
    with Writer(str(path)) as writer:
        writer.add_sync(RunRecord("run_1", "train", 1.0))
        with Reader(str(path)) as reader:
            assert reader.run("run_1").kind == "train"
        check_file(path)
        subprocess.run([sys.executable, "-c", another, str(path)], check=True)
        assert path.with_name("bridle.db-wal").exists()
        writer.add_sync(RunRecord("run_2", "train", 2.0))
    with Reader(str(path)) as reader:
        assert [run.id for run in reader.runs()] == ["run_1", "run_2"]
