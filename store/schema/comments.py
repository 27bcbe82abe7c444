"""The meanings of columns and views, as PostgreSQL shows them (``\\d+ turns``).

Those of tables' columns are in their declaration (``store/schema/columns.py``). A migration leaves
them out: they are written whenever a store has been brought up to date.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.schema import SetColumnComment

from bridle.store.schema.tables import metadata
from bridle.store.schema.views import turn_columns

_VIEWS: Final = {
    "turns": "A call of a session, in the order of their start",
    "messages": "A message, with the turn that brought it",
    "tool_calls": "A call of a tool, as the model wrote it",
    "scores": "The latest score of each place, name and source",
    "token_accounts": "The fate of the sampled tokens of each session",
}


def comment(connection: Connection) -> None:
    """Write the meanings of columns and views into PostgreSQL."""
    if connection.dialect.name != "postgresql":
        return
    for table in metadata.sorted_tables:
        for column in table.columns:
            if column.comment is not None:
                connection.execute(SetColumnComment(column))
    for name, meaning in _VIEWS.items():
        connection.exec_driver_sql(f"COMMENT ON VIEW {name} IS {_literal(connection, meaning)}")
    for one in turn_columns():
        meaning = _literal(connection, one.meaning)
        connection.exec_driver_sql(f"COMMENT ON COLUMN turns.{one.name} IS {meaning}")


def _literal(connection: Connection, text: str) -> str:
    driver: Any = connection.connection.driver_connection
    quoted: str = connection.dialect.loaded_dbapi.sql.quote(text, driver)
    return quoted.replace("%", "%%")
