"""Which session names are free, told by SQLite in microseconds: no thread, no pool, no waiting."""

from __future__ import annotations

import sqlite3
from typing import Any

from sqlalchemy import Engine

_TAKEN = "SELECT 1 FROM sessions WHERE name = ?"


class FreeNames:
    """For one thread, an event loop's too: one look into an index, which waits for no lock.

    ``engine`` is SQLite's, of :func:`bridle.store.schema.database.connect`.
    """

    def __init__(self, engine: Engine) -> None:
        self._connection = engine.raw_connection()
        self._cursor: Any = self._connection.cursor()
        self._cursor.execute("PRAGMA busy_timeout = 0")

    def __contains__(self, name: object) -> bool:
        """Whether no session has the name. No, too, when the store cannot tell at once."""
        try:
            return not self._cursor.execute(_TAKEN, (name,)).fetchall()
        except sqlite3.Error:
            return False

    def close(self) -> None:
        """Ends the connection: its settings are not for others."""
        self._connection.invalidate()
