"""The search for sessions by their texts, as SQL.

Digested sessions are found by the index (``store/writing/search_index.py``): FTS5 in SQLite, a
``tsvector`` in PostgreSQL. The messages of the newest sessions that are not digested, such as those
that still run, are read, and the text is looked for as it stands.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Text,
    cast,
    column,
    exists,
    func,
    or_,
    select,
    table,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from bridle.store.encoding.words import open_ended, words_of
from bridle.store.schema.derived import INDEX, search_documents, search_words, session_totals
from bridle.store.schema.tables import call_messages, calls, sessions

TAIL: Final = 500
"""Maximum sessions without derived rows whose messages are read, the newest first."""


_index: Final = table(INDEX, column("rowid"), column(INDEX))


class _by_dialect(FunctionElement[bool]):
    """A condition in the words of SQLite, and in those of PostgreSQL."""

    type = Boolean()
    inherit_cache = True


@compiles(_by_dialect, "sqlite")
def _first(element: Any, compiler: Any, **given: Any) -> str:
    first, _ = element.clauses
    return str(compiler.process(first, **given))


@compiles(_by_dialect, "postgresql")
def _second(element: Any, compiler: Any, **given: Any) -> str:
    _, second = element.clauses
    return str(compiler.process(second, **given))


def _matching(asked: str, words: list[str]) -> ColumnElement[bool]:
    """Return the condition that a document has the words of a text as a phrase."""
    end = open_ended(asked)
    fts5 = f'"{" ".join(words)}"' + ("*" if end else "")
    tsquery = " <-> ".join(f"'{word}'" for word in words) + (":*" if end else "")
    query = func.to_tsquery("simple", tsquery)
    has = search_documents.c.id
    return _by_dialect(
        has.in_(select(_index.c.rowid).where(_index.c[INDEX].op("MATCH")(fts5))),
        has.in_(select(search_words.c.document_id).where(search_words.c.words.op("@@")(query))),
    )


def says(text: str) -> ColumnElement[bool]:
    """Return the condition that the words of ``text`` follow each other in a session's texts.

    The last word, if it has three characters or more and ends the text, also stands for the longer
    words that begin so. A text without a letter or digit is in no digested session.
    """
    words = words_of(text)
    if not words:
        return _tail_says(text)
    indexed = select(search_documents.c.session_id).where(_matching(text, words))
    return or_(sessions.c.id.in_(indexed), _tail_says(text))


def _tail_says(asked: str) -> ColumnElement[bool]:
    """Return the condition that a session without derived rows has the text in a message."""
    others = sessions.alias()
    newest = (
        select(others.c.id)
        .where(~exists().where(session_totals.c.session_id == others.c.id))
        .order_by(others.c.created_at.desc())
        .limit(TAIL)
        .scalar_subquery()
    )
    said = select(calls.c.session_id).join(call_messages, call_messages.c.call_id == calls.c.id)
    texts = (
        call_messages.c.content,
        cast(call_messages.c.content_json, Text),
        cast(call_messages.c.tool_calls, Text),
        call_messages.c.reasoning,
    )
    contains = or_(*(column.icontains(asked, autoescape=True) for column in texts))
    return sessions.c.id.in_(said.where(calls.c.session_id.in_(newest), contains))
