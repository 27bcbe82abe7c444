"""Copies of a store: between SQLite and PostgreSQL, and as a backup.

The source is read in one snapshot, so the copy is the store as it was at one moment, whatever is
written meanwhile. Rows of ``writers`` are left out, because they are the living processes of the
source. Calls and runs that were open in the source are marked as interrupted when the copy is first
written to.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Table, func, insert, select
from sqlalchemy.exc import DBAPIError

from bridle.errors import BridleError
from bridle.store.errors import StoreUnavailable
from bridle.store.schema.database import (
    connect,
    database_url,
    make_whole,
    migrate,
    newest_revision,
    revision,
    shown,
    snapshot,
    transaction,
)
from bridle.store.schema.derived import DERIVED
from bridle.store.schema.files import make_private_file
from bridle.store.schema.tables import metadata, writers

_ROWS_AT_ONCE: Final = 500


class NotEmpty(BridleError, ValueError):
    """The target of a copy is not empty."""


def copy_store(source: str, target: str) -> dict[str, int]:
    """Copy every row of ``source`` into ``target``, which is made if it does not exist.

    Return the number of rows by table. Nothing is copied unless all is. Raise :class:`NotEmpty` if
    the target holds a row, and :class:`StoreUnavailable` if the source has another schema or one of
    the two fails.
    """
    try:
        found = revision(source)
    except DBAPIError as error:
        raise StoreUnavailable(f"{shown(source)} cannot be read: {error.orig}") from error
    if found != newest_revision():
        # Columns that only one of the two has would be missed, or lost without a word.
        cause = f"its schema is {found or 'not ours'}, not {newest_revision()}"
        raise StoreUnavailable(f"{shown(source)} cannot be copied: {cause}")
    migrate(target)
    origin, destination = connect(source), connect(target, synchronous="FULL")
    try:
        with snapshot(origin) as reading, transaction(destination) as writing:
            for table in _tables():
                if writing.execute(select(func.count()).select_from(table)).scalar_one():
                    cause = f"{shown(target)} already holds {table.name}: give an empty store"
                    raise NotEmpty(cause)
            return {str(table.name): _copy(reading, writing, table) for table in _tables()}
    except DBAPIError as error:
        raise StoreUnavailable(f"{shown(source)} cannot be copied: {error.orig}") from error
    finally:
        make_whole(destination)
        origin.dispose()
        destination.dispose()


def backup(source: str, target: Path) -> int:
    """Write ``source`` as one SQLite file, complete or not at all, and return its bytes.

    Writers may go on meanwhile. Missing folders on the way are made. Only their owner has access to
    the file and these folders. Raise ``FileExistsError`` if the target exists, and
    :class:`StoreUnavailable` if the copy cannot be written or is not sound.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    part = target.with_name(f"{target.name}.part")
    try:
        for leftover in _files(part):
            leftover.unlink(missing_ok=True)
        make_private_file(part)
    except OSError as error:
        raise StoreUnavailable(f"{target} cannot be written: {error.strerror}") from error
    try:
        url = database_url(source)
        if url.get_backend_name() == "sqlite":
            _sqlite_backup(Path(url.database or ""), part)
        else:
            copy_store(source, str(part))
        _prove(part)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(target)
    finally:
        for leftover in _files(part):
            leftover.unlink(missing_ok=True)
    _sync_folder(target.parent)
    return target.stat().st_size


def _tables() -> list[Table]:
    """Return the tables that are copied. Derived rows are made again, in the copy's own form."""
    left = {writers, *DERIVED}
    return [table for table in metadata.sorted_tables if table not in left]


def _copy(reading: Connection, writing: Connection, table: Table) -> int:
    rows = reading.execution_options(yield_per=_ROWS_AT_ONCE).execute(select(table))
    copied = 0
    for some in rows.mappings().partitions():
        writing.execute(insert(table), [dict(row) for row in some])
        copied += len(some)
    return copied


def _sqlite_backup(source: Path, target: Path) -> None:
    if not source.exists():
        raise StoreUnavailable(f"there is no store at {source}")
    try:
        with _opened(source) as origin, _opened(target) as destination:
            # All pages in one step: one in several starts over whenever another process writes.
            origin.backup(destination, pages=-1)
            destination.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.Error as error:
        cause = f"{source} cannot be copied to {target}: {error}"
        raise StoreUnavailable(cause) from error


def _prove(path: Path) -> None:
    with _opened(path) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
    if verdict != "ok":
        raise StoreUnavailable(f"the backup is damaged: {verdict}")


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path)
    try:
        yield connection
    finally:
        connection.close()


def _files(path: Path) -> list[Path]:
    """Return a database file and the files that SQLite may keep beside it."""
    return [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
