"""Engines for the two databases, and the migration of any schema to the newest one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, cast

import orjson
import sqlalchemy
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    event,
    insert,
    inspect,
    make_url,
    select,
)
from sqlalchemy.exc import ArgumentError, DBAPIError

from bridle.store.encoding.packing import dump_json
from bridle.store.errors import StoreUnavailable
from bridle.store.schema.columns import decoded
from bridle.store.schema.comments import comment
from bridle.store.schema.connections import postgres_engine, translate
from bridle.store.schema.derived import METADATA as metadata
from bridle.store.schema.files import (
    APPLICATION_ID,
    check_file,
    check_tables,
    checkpoint,
    make_private_file,
)
from bridle.store.schema.views import create_views, drop_views

Synchronous = Literal["OFF", "NORMAL", "FULL", "EXTRA"]

BUSY_TIMEOUT_S: Final = 5.0
"""Seconds until SQLite, which waits for another process's transaction, reports "locked"."""

_SCHEMES: Final = frozenset({"sqlite", "postgresql+psycopg"})

_AT_ONCE: Final = 500
"""Maximum identifiers per statement, because databases limit the number of parameters."""

_PAGE_SIZE: Final = 8192
"""Bytes per page of a new SQLite file. A call's row is about 1 KB, and the part that does not fit a
page wastes another."""

_MIGRATIONS: Final = Path(__file__).parent / "migrations"
_VERSIONS: Final = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""The table in which Alembic keeps the database's revision."""
_MIGRATION_LOCK: Final = 0x62726964
"""Key of the PostgreSQL advisory lock, so that processes that start together migrate one by one."""

# Without an adapter the driver looks for one in three ways, for every NULL and every blob that it
# binds, and then takes them as they are: longer than it takes to store them.
sqlite3.register_adapter(type(None), {}.get)  # type: ignore[arg-type]
sqlite3.register_adapter(bytes, bytes)


def connect(
    url: str,
    *,
    synchronous: Synchronous = "NORMAL",
    page_cache_kib: int = 2048,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
    create: bool = False,
    writes: bool = False,
) -> Engine:
    """Return an engine for ``url``: a path, ``sqlite:///…`` or ``postgresql://…``.

    A missing SQLite file is an error unless ``create``. A file made anew in the place of one that
    was moved would take away the moved one's last transactions.

    SQLite runs in WAL mode with foreign keys on. ``synchronous`` is SQLite's pragma: ``NORMAL``
    keeps every commit through the death of the process, ``FULL`` also through a power cut. Each
    connection caches ``page_cache_kib`` of pages; a process has up to a dozen connections.
    PostgreSQL keeps its own ``synchronous_commit``, which is on by default. The connections to it
    are shared by the whole process, and ``writes`` takes the one for writers of records
    (``store/schema/connections.py``). Errors show statements, not the values in them.

    Raise :class:`StoreUnavailable` if ``url`` does not name a store that can be opened here. Other
    programs' databases and files are refused, too.
    """
    parsed = database_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed, synchronous, page_cache_kib, busy_timeout_s, create)
    return postgres_engine(parsed, writes=writes)


def file_id(engine: Engine) -> tuple[int, int] | None:
    """Return the device and inode of an SQLite store's file.

    Return ``None`` if the file is missing and for PostgreSQL.
    """
    if engine.dialect.name != "sqlite":
        return None
    try:
        found = os.stat(str(engine.url.database))
    except OSError:
        return None
    return found.st_dev, found.st_ino


def database_url(url: str) -> sqlalchemy.URL:
    """Return ``url`` in SQLAlchemy's form.

    A bare path means SQLite, and PostgreSQL goes through psycopg.

    Raise :class:`StoreUnavailable` for any other database, for text that is not a URL, and for a
    URL of SQLite without a file.
    """
    if "://" not in url:
        return sqlalchemy.URL.create("sqlite", database=str(Path(url).expanduser().absolute()))
    scheme, rest = url.split("://", 1)
    if scheme in ("postgres", "postgresql"):
        scheme = "postgresql+psycopg"
    if scheme not in _SCHEMES:
        cause = f"a store is an SQLite file or in PostgreSQL (postgresql://…), not {scheme}://"
        raise StoreUnavailable(cause)
    try:
        parsed = make_url(f"{scheme}://{rest}")
    except (ArgumentError, ValueError) as error:  # ValueError: a port that is no number
        raise StoreUnavailable("the store's URL cannot be read") from error
    if scheme == "sqlite" and (parsed.host or parsed.database in (None, "", ":memory:")):
        cause = (
            "an SQLite store's URL names a file: sqlite:///from/here.db, sqlite:////from/root.db"
        )
        raise StoreUnavailable(cause)
    return parsed


def shown(url: str) -> str:
    """Return ``url`` without its password, for people and logs."""
    return database_url(url).render_as_string(hide_password=True) if "://" in url else url


def migrate(url: str) -> None:
    """Migrate the database to the newest schema. An SQLite file and its folder are created.

    Several processes may do so at once. A database without a revision gets the newest schema at
    once; any other goes through the migrations. Raise :class:`StoreUnavailable` if the store cannot
    be opened or migrated.
    """
    engine = connect(url, create=True)
    if engine.dialect.name == "sqlite":
        # A table is changed by making it anew, while what belongs to it stays.
        event.listen(engine, "connect", _without_foreign_keys)
    changes = False
    try:
        with transaction(engine) as connection:
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
            check_tables(shown(url), inspect(connection).get_table_names())
            found = _current(connection)
            changes = _mark_as_ours(connection)
            if found == newest_revision():
                return
            _refuse_newer(found)
            changes = True
            if found is None:
                metadata.create_all(connection, checkfirst=False)
                _VERSIONS.create(connection, checkfirst=True)
                connection.execute(insert(_VERSIONS).values(version_num=newest_revision()))
            else:
                drop_views(connection)
                upgrade(connection)
            create_views(connection)
            comment(connection)
    except DBAPIError as error:
        raise StoreUnavailable(f"the store cannot be opened: {error.orig}") from error
    finally:
        if changes:
            make_whole(engine)
        engine.dispose()


def make_whole(engine: Engine, *, wait: bool = True) -> None:
    """Move the content of an SQLite store's write-ahead log into its file.

    A copy of the file alone is then the whole store. With ``wait``, wait for the store's readers
    and writers and empty the log, too. Do nothing if the file is missing or stays locked.
    """
    if engine.dialect.name != "sqlite" or file_id(engine) is None:
        return
    try:
        connection = engine.raw_connection()
    except (DBAPIError, sqlite3.Error):
        return
    try:
        driver = cast("sqlite3.Connection", connection.driver_connection)
        checkpoint(driver, "TRUNCATE" if wait else "PASSIVE")
    finally:
        connection.close()


def driver_error(connection: Connection, sql: str, error: Exception) -> DBAPIError:
    """Return SQLAlchemy's error for an ``error`` of the driver.

    It is for statements that go to the driver directly, because SQLAlchemy's way to a cursor costs
    more than SQLite's work on a row.
    """
    dialect = connection.dialect
    wrapped = DBAPIError.instance(sql, None, error, dialect.loaded_dbapi.Error, dialect=dialect)
    return cast("DBAPIError", wrapped)


def newest_revision() -> str:
    """Return the revision of the schema that this version of the code reads and writes."""
    return max(path.name.split("_")[0] for path in (_MIGRATIONS / "versions").glob("[0-9]*_*.py"))


def revision(url: str) -> str | None:
    """Return the revision of the database's schema, or ``None`` if it is not a store's.

    Change nothing.

    Raise SQLAlchemy's errors if the database cannot be reached.
    """
    engine = connect(url)
    try:
        with engine.connect() as connection:
            return _current(connection)
    finally:
        engine.dispose()


def refuse_newer(engine: Engine) -> None:
    """Raise :class:`StoreUnavailable` for a newer store, and for a database without a store.

    A newer Bridle has migrated a newer store. Such a store may keep data where this version does
    not look: readers would omit it, and deletions would leave it behind.
    """
    sqlite = engine.dialect.name == "sqlite"
    place = str(engine.url.database) if sqlite else engine.url.render_as_string(hide_password=True)
    with engine.connect() as connection:
        check_tables(place, inspect(connection).get_table_names())
        found = _current(connection)
    if found is None:
        raise StoreUnavailable(f"{place} holds no store yet: `bridle proxy` makes one")
    _refuse_newer(found)


def _refuse_newer(found: str | None) -> None:
    newest = newest_revision()
    if found is not None and found > newest:
        cause = f"its schema is {found}, and this one knows {newest}"
        raise StoreUnavailable(f"the store is a newer Bridle's: {cause}")


def _without_foreign_keys(connection: sqlite3.Connection, _: object) -> None:
    connection.execute("PRAGMA foreign_keys=OFF")


def upgrade(connection: Connection) -> None:
    """Run the migrations from the database's revision to the newest one."""
    # A proxy that has nothing to migrate need not hold Alembic and what comes with it in memory.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        cause = f"its schema is {_current(connection)}, from before the first release"
        raise StoreUnavailable(
            f"the store cannot be migrated: {cause}; name a new store"
        ) from error
    if connection.dialect.name == "sqlite":
        parted = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        if parted:
            raise StoreUnavailable(f"rows of {parted[0][0]} lost what they belong to: not migrated")


def _mark_as_ours(connection: Connection) -> bool:
    """Write the application's id into the header of an SQLite file.

    Return whether it was missing.
    """
    if connection.dialect.name != "sqlite":
        return False
    if connection.exec_driver_sql("PRAGMA application_id").scalar() == APPLICATION_ID:
        return False
    connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
    return True


def _current(connection: Connection) -> str | None:
    if not inspect(connection).has_table(_VERSIONS.name):
        return None
    return connection.execute(select(_VERSIONS.c.version_num)).scalar()


def in_pieces(identifiers: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield parts of the identifiers, each of as many as one statement takes."""
    for start in range(0, len(identifiers), _AT_ONCE):
        yield identifiers[start : start + _AT_ONCE]


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that may write from its first statement on. It waits for its turn now."""
    with engine.connect() as plain:
        connection = plain.execution_options(immediate=True)
        with connection.begin():
            yield connection


@contextmanager
def snapshot(engine: Engine) -> Iterator[Connection]:
    """Open a transaction whose reads all see the same moment."""
    with engine.connect() as plain:
        connection = plain
        if engine.dialect.name == "postgresql":
            connection = plain.execution_options(isolation_level="REPEATABLE READ")
        with connection.begin():
            yield connection


def _sqlite(
    url: sqlalchemy.URL,
    synchronous: Synchronous,
    page_cache_kib: int,
    busy_timeout_s: float,
    create: bool,
) -> Engine:
    path = Path(str(url.database)).absolute()
    check_file(path)
    if create:
        _refuse_another_stores_log(path)
        try:
            make_private_file(path)
        except OSError as error:
            raise StoreUnavailable(f"the store cannot be made: {error}") from error
    file = f"{path.as_uri()}?mode={'rwc' if create else 'rw'}"
    engine = sqlalchemy.create_engine(
        url,
        json_serializer=_dumps,
        json_deserializer=orjson.loads,
        creator=lambda: sqlite3.connect(
            file, uri=True, timeout=busy_timeout_s, check_same_thread=False
        ),
        hide_parameters=True,
    )

    event.listen(engine, "handle_error", translate)

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: object) -> None:
        # The driver's own transaction control would begin too late to lock for writing at once.
        connection.isolation_level = None
        connection.text_factory = decoded
        cursor = connection.cursor()
        for pragma in (
            f"page_size={_PAGE_SIZE}",
            "journal_mode=WAL",
            f"synchronous={synchronous}",
            "foreign_keys=ON",
            f"cache_size=-{page_cache_kib}",
            "wal_autocheckpoint=4000",
            "temp_store=MEMORY",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and writes later cannot wait for its turn in SQLite.
        immediate = connection.get_execution_options().get("immediate", False)
        begin = "BEGIN IMMEDIATE" if immediate else "BEGIN"
        try:
            connection.connection.cursor().execute(begin).close()
        except sqlite3.Error as error:
            raise driver_error(connection, begin, error) from error

    return engine


def _refuse_another_stores_log(path: Path) -> None:
    """Refuse to make a file beside the log of a store that was moved away.

    The new file would empty the log.
    """
    log = Path(f"{path}-wal")
    if not path.exists() and log.exists() and log.stat().st_size:
        cause = f"{log} has the last transactions of a store that was here: move it with the store"
        raise StoreUnavailable(cause)


def _dumps(value: object) -> str:
    return dump_json(value).decode()
