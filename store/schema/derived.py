"""Tables that are derived from a session's calls once it is sealed (``store/writing/digest.py``).

They make pages and searches independent of the number of calls. A session with a row in
``session_totals`` has all of its sums, and one with its last document is in the index. For others,
such as sessions that still run, readers count the calls or read the messages. Derived rows can
be deleted at any time; they are made again, and copies of a store do without them.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Float,
    ForeignKey,
    FromClause,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    event,
    exists,
)
from sqlalchemy.dialects.postgresql import TSVECTOR
from sqlalchemy.types import TypeEngine

from bridle.store.schema.columns import Time
from bridle.store.schema.tables import metadata

METADATA: Final = metadata
"""All tables of a store, the derived ones among them."""
NOTES: Final = (
    "complete",
    "failed",
    "quarantined",
    "without_ids",
    "length",
    "greedy",
    "broken",
    "root",
)
"""The names of the calls that findings count (``store/reading/call_conditions.py``)."""
LONGEST_VALUE: Final = 256
"""Characters of a counted value, such as the reason of a failure, that are kept."""

_CLUSTERED: Final[dict[str, Any]] = {"sqlite_with_rowid": False}
"""SQLite keeps the rows of these tables in the index of their keys, by which they are read."""

session_totals = Table(
    "session_totals",
    metadata,
    Column("session_id", String(64), ForeignKey("sessions.id"), primary_key=True),
    Column("calls", Integer, nullable=False),
    Column("prompt_tokens", BigInteger),
    Column("sampled_tokens", BigInteger, nullable=False),
    Column("version_start", BigInteger),
    Column("version_end", BigInteger),
    Column("started_at", Time),
    Column("ended_at", Time),
    Column("failed", Integer, nullable=False),
    Column("breaks", Integer, nullable=False),
    Column("model", Text),
    Column("counted", Integer, nullable=False),
    Column("continued", Integer, nullable=False),
    Column("waits", Integer, nullable=False),
    Column("waited_s", Float(53), nullable=False),
    Column("replies", Integer, nullable=False),
    Column("replied_s", Float(53), nullable=False),
    *(Column(f"noted_{name}", Integer, nullable=False) for name in NOTES),
    **_CLUSTERED,
)
"""The sums over a sealed session's calls. ``prompt_tokens`` is NULL if no engine counted a prompt.
``failed`` counts those without a usable reply, and
``model`` is the last by name of those that were served. ``counted`` leaves out the calls that only
count tokens, and so do all columns after it: the calls that continue another, the number and the
seconds of waits for a first token and of replies after it, and the numbers of :data:`NOTES`."""

session_counts = Table(
    "session_counts",
    metadata,
    Column("session_id", String(64), ForeignKey("sessions.id"), primary_key=True),
    Column("name", String(16), primary_key=True),
    Column("value", String(LONGEST_VALUE), primary_key=True),
    Column("number", Integer, nullable=False),
    Index("ix_session_counts_name", "name", "value", "session_id"),
    **_CLUSTERED,
)
"""The numbers of a sealed session's calls by a fact: ``status``, ``kind`` and ``break`` as the view
``turns`` has them, ``model``, ``noted`` (what findings count), and the reasons of each ``failure``
and ``quarantine``."""

session_fates = Table(
    "session_fates",
    metadata,
    Column("session_id", String(64), ForeignKey("sessions.id"), primary_key=True),
    Column("account", String(64), primary_key=True),
    Column("fate", String(16), primary_key=True),
    Column("reason", String(64), primary_key=True),
    Column("tokens", BigInteger, nullable=False),
    Index("ix_session_fates_account", "account", "fate", "reason", "tokens"),
    **_CLUSTERED,
)
"""The fates of a sealed session's sampled tokens, once for each account that has the session. The
``account`` is the id of a run, or empty for the account of the whole store, which the view
``token_accounts`` has. A session without a row in ``session_totals`` has none here."""

search_documents = Table(
    "search_documents",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("session_id", String(64), ForeignKey("sessions.id"), nullable=False),
    Column("last", Boolean),
    Index(None, "session_id", "last"),
)
"""The documents of the search: consecutive parts of the texts of a session. ``last`` is true for
the last one, which is written when all texts are indexed, and NULL for the others."""


def is_indexed(of: FromClause) -> ColumnElement[bool]:
    """Return the condition that all texts of a session are indexed, in a query of ``of``."""
    own = search_documents.c
    return exists().where(own.session_id == of.c.id, own.last.is_(True))


_WORDS: Final[TypeEngine[Any]] = LargeBinary().with_variant(TSVECTOR(), "postgresql")

search_words = Table(
    "search_words",
    metadata,
    Column("document_id", ForeignKey(search_documents.c.id), primary_key=True),
    Column("words", _WORDS, nullable=False),
)
"""The words of each document (``store/encoding/words.py``). In PostgreSQL the column is a
``tsvector``. In SQLite it holds the words compressed, and the FTS5 table ``search_index``, which
can only remove words that it is given, has a row of the same number."""

DERIVED: Final = (session_totals, session_counts, session_fates, search_documents, search_words)
"""The derived tables, owners first."""
INDEX: Final = "search_index"
"""The FTS5 table of an SQLite store. Its own tables are named after it."""
CREATE_INDEX: Final = {
    "sqlite": (
        f"CREATE VIRTUAL TABLE {INDEX} USING fts5("
        "words, content='', columnsize=0, tokenize='unicode61 remove_diacritics 0')"
    ),
    "postgresql": "CREATE INDEX ix_search_words_words ON search_words USING gin (words)",
}
"""The statement that makes the index of the words, by dialect."""


def _ddl(statement: str, dialect: str) -> Any:
    return DDL(statement).execute_if(dialect=dialect)  # type: ignore[no-untyped-call]


for _dialect, _statement in CREATE_INDEX.items():
    event.listen(search_words, "after_create", _ddl(_statement, _dialect))
event.listen(search_words, "before_drop", _ddl(f"DROP TABLE IF EXISTS {INDEX}", "sqlite"))
