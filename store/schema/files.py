"""An SQLite store's file: whether it is a store, its permissions, and its write-ahead log.

A store's header has :data:`APPLICATION_ID`. A file without it is checked before anything writes to
it, because opening a database for writing changes it. Only their owner has access to files and
folders that are made here; SQLite gives ``-wal`` and ``-shm`` the permissions of the file beside
them.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import stat
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Final

from bridle.store.errors import StoreUnavailable

log = logging.getLogger("bridle.store")

APPLICATION_ID: Final = 0x4272646C
"""The bytes ``Brdl``, which SQLite keeps in the header of the file (``PRAGMA application_id``)."""
OUR_TABLES: Final = frozenset({"alembic_version", "sessions", "calls"})
"""Tables that the stores of all releases have."""
_SHOWN: Final = 3
"""Maximum tables of another program that the message names."""

_warned: set[tuple[int, int]] = set()


def data_home() -> Path:
    """Return Bridle's folder for the user's recordings.

    It is ``$BRIDLE_HOME``, else the XDG data folder.
    """
    if home := os.environ.get("BRIDLE_HOME"):
        return Path(home)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "bridle"


def default_store() -> str:
    """Return ``$BRIDLE_STORE`` (a path or a database URL), else the data folder's ``bridle.db``."""
    return os.environ.get("BRIDLE_STORE") or str(data_home() / "bridle.db")


def check_file(path: Path) -> None:
    """Raise :class:`StoreUnavailable` unless ``path`` is a store, empty, or missing.

    Change nothing. Log a warning, once, for a store that others may read.
    """
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            _refuse(path, "is a folder", f"name a file in it: --store {path / 'bridle.db'}")
        if not stat.S_ISREG(found.st_mode):
            _refuse(path, "is no regular file", _ANOTHER)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be read: {error.strerror}") from error
    if not found.st_size and not _log_of(path):
        return
    if not os.access(path, os.R_OK):
        raise StoreUnavailable(f"{path} cannot be read: {os.strerror(errno.EACCES)}")
    _check_content(path)
    _warn_if_open(path, found)


_ANOTHER: Final = "give --store another file, which is made when it is not there"


def check_tables(place: str, tables: Collection[str]) -> None:
    """Raise :class:`StoreUnavailable` if the tables are those of another program."""
    if tables and not set(tables) >= OUR_TABLES:
        named = ", ".join(sorted(tables)[:_SHOWN]) + (", …" if len(tables) > _SHOWN else "")
        raise StoreUnavailable(f"{place} is another program's database (tables: {named}): {_OWN}")


_OWN: Final = "give Bridle a database of its own with --store"


def make_private_file(path: Path) -> None:
    """Make an empty file that only its owner may read, and its missing folders likewise.

    Leave an existing file as it is.
    """
    make_private_folder(path.parent)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return


def make_private_folder(path: Path) -> None:
    """Make a folder, and the missing ones above it, to which only their owner has access."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(20, os.strerror(20), str(path))


def checkpoint(connection: sqlite3.Connection, mode: str = "TRUNCATE") -> bool:
    """Move the committed content of the write-ahead log into the file.

    The file then is the whole store. Return whether all of the content was moved: readers of an
    earlier moment, and other writers, may prevent it. ``TRUNCATE`` waits for them and empties the
    log, ``PASSIVE`` does neither.
    """
    try:
        busy, logged, moved = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    except sqlite3.Error as error:
        log.info("store_not_checkpointed: %s", error)
        return False
    return not busy and logged == moved


def _check_content(path: Path) -> None:
    """Raise :class:`StoreUnavailable` unless the file is a store.

    SQLite alone opens it. If anything else in this process opened and closed the file, POSIX would
    release the locks of all connections to it, and other processes could remove the log that they
    write to (https://www.sqlite.org/howtocorrupt.html, section 2.2).
    """
    # Without a log beside it the file is opened in a way that makes none.
    mode = "mode=ro" if _log_of(path) else "immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True)) as connection:
            (identity,) = connection.execute("PRAGMA application_id").fetchone()
            if identity == APPLICATION_ID:
                return
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = {name for (name,) in rows if not name.startswith("sqlite_")}
    except sqlite3.Error as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
            _refuse(path, "is no database", _ANOTHER)
        raise StoreUnavailable(f"{path} cannot be read as a database: {error}") from error
    if identity != 0:
        _refuse(path, "is another program's database", _OWN)
    check_tables(str(path), tables)


def _log_of(path: Path) -> int:
    """Return the bytes of the write-ahead log beside the file."""
    try:
        return path.with_name(f"{path.name}-wal").stat().st_size
    except OSError:
        return 0


def _refuse(path: Path, what: str, remedy: str) -> None:
    raise StoreUnavailable(f"{path} {what}, not a store: {remedy}")


def _warn_if_open(path: Path, found: os.stat_result) -> None:
    place = found.st_dev, found.st_ino
    if found.st_mode & 0o077 and place not in _warned:
        _warned.add(place)
        log.warning("others on this machine may read %s: chmod 600 %s*", path, path)
