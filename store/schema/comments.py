"""The meanings of views and their columns, as PostgreSQL shows them (``\\d+ turns``).

Those of tables' columns are in the declaration of the columns (``store/schema/columns.py``).
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection

from bridle.store.schema.views import turn_columns

_VIEWS: Final = {
    "turns": "A call of a session, in the order of their start",
    "messages": "A message, with the turn that brought it",
    "tool_calls": "A call of a tool, as the model wrote it",
    "scores": "The latest score of each place, name and source",
    "token_accounts": "The fate of the sampled tokens of each session",
}


def comment_views(connection: Connection) -> None:
    """Write the meanings of the views, and of the columns of ``turns``, into PostgreSQL."""
    if connection.dialect.name != "postgresql":
        return
    for name, meaning in _VIEWS.items():
        connection.exec_driver_sql(f"COMMENT ON VIEW {name} IS {_literal(connection, meaning)}")
    for one in turn_columns():
        meaning = _literal(connection, one.meaning)
        connection.exec_driver_sql(f"COMMENT ON COLUMN turns.{one.name} IS {meaning}")


def _literal(connection: Connection, text: str) -> str:
    driver: Any = connection.connection.driver_connection
    quoted: str = connection.dialect.loaded_dbapi.sql.quote(text, driver)
    return quoted.replace("%", "%%")
