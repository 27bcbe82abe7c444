"""The statements of every call, compiled once and run by the driver's own ``executemany``.

The rows of ``store/writing/rows.py`` need none of what SQLAlchemy does on its way to a cursor. Its
errors are kept: the writer tells by them what may pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Dialect, Executable, bindparam, delete, insert, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import psycopg

from bridle.store.schema.database import driver_error
from bridle.store.schema.tables import bodies, calls, running, spans, templates
from bridle.store.writing.liveness import RENEW
from bridle.store.writing.rows import END_COLUMNS


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL text and the order of its parameters."""

    sql: str
    names: tuple[str, ...]

    def run(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> int:
        """Executes for all rows; returns how many rows of the database were affected.

        Raises SQLAlchemy's ``DBAPIError``.
        """
        if not rows:
            return 0
        values = itemgetter(*self.names)
        given = [values(row) for row in rows]
        if len(self.names) == 1:
            given = [(value,) for value in given]
        try:
            cursor = connection.connection.cursor()
            try:
                cursor.executemany(self.sql, given)
                return cursor.rowcount
            finally:
                cursor.close()
        except connection.dialect.loaded_dbapi.Error as error:
            raise driver_error(connection, self.sql, error) from error


@dataclass(frozen=True, slots=True)
class Statements:
    """What a call costs the database."""

    add_bodies: Statement
    add_templates: Statement
    begin_calls: Statement
    add_spans: Statement
    end_calls: Statement
    add_running: Statement
    end_running: Statement
    renew: Statement


@cache
def statements(backend: str) -> Statements:
    """The statements for ``sqlite`` or ``postgresql``."""
    dialect: Dialect
    # Rows that are named by what is in them: another writer may have added the same.
    add_bodies: Executable
    add_templates: Executable
    if backend == "postgresql":
        dialect = psycopg.dialect(paramstyle="format")  # type: ignore[no-untyped-call]
        add_bodies = postgresql.insert(bodies).on_conflict_do_nothing()
        add_templates = postgresql.insert(templates).on_conflict_do_nothing()
    else:
        dialect = sqlite.dialect(paramstyle="qmark")
        add_bodies = sqlite.insert(bodies).on_conflict_do_nothing()
        add_templates = sqlite.insert(templates).on_conflict_do_nothing()
    end_calls = (
        update(calls)
        .where(calls.c.id == bindparam("_id"))
        .values({name: bindparam(name) for name in END_COLUMNS})
    )
    return Statements(
        add_bodies=_compile(add_bodies, dialect),
        add_templates=_compile(add_templates, dialect),
        begin_calls=_compile(insert(calls), dialect),
        add_spans=_compile(insert(spans), dialect),
        end_calls=_compile(end_calls, dialect),
        add_running=_compile(insert(running), dialect),
        end_running=_compile(delete(running).where(running.c.call_id == bindparam("_id")), dialect),
        renew=_compile(RENEW, dialect),
    )


def _compile(statement: Executable, dialect: Dialect) -> Statement:
    compiled: Any = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
    return Statement(str(compiled), tuple(compiled.positiontup))
