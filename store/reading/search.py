"""The search for sessions by their texts, as SQL.

Most sessions are found by the index (``store/writing/search_index.py``): FTS5 in SQLite, a
``tsvector`` in PostgreSQL. The messages of the newest sessions that are not in it, such as those
that still run, are read, and the text is looked for as it stands.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Text,
    and_,
    cast,
    column,
    func,
    or_,
    select,
    table,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from bridle.store.encoding.words import open_ended, words_of
from bridle.store.schema.derived import INDEX, is_indexed, search_documents, search_words
from bridle.store.schema.tables import call_messages, calls, sessions

TAIL: Final = 500
"""Maximum sessions outside the index whose messages are read, the newest first."""


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


def _in_documents(having: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a session has a document that meets ``having``."""
    return sessions.c.id.in_(select(search_documents.c.session_id).where(having))


def _by_fts5(words: list[str], end: str) -> ColumnElement[bool]:
    """Return the condition of SQLite that a session has the words as a phrase."""
    query = _index.c[INDEX].op("MATCH")(f'"{" ".join(words)}"{end}')
    return _in_documents(search_documents.c.id.in_(select(_index.c.rowid).where(query)))


def _by_tsvector(words: list[str], end: str) -> ColumnElement[bool]:
    """Return the condition of PostgreSQL that a session has the words as a phrase.

    The index finds the documents that have all words, without a look at their positions: to read
    the ``tsvector`` of every document takes most of a second at a million calls. The positions are
    read session by session, so that a page reads those of the sessions that it shows.
    """
    own, quoted = search_words.c, [f"'{word}'" for word in words]

    def has(operator: str) -> ColumnElement[bool]:
        query = func.to_tsquery("simple", operator.join(quoted) + (end and f":{end}"))
        # The planner, which believes that reading a long value is free, must not see the words: it
        # would read all values for common ones.
        return own.words.op("@@")(select(query).scalar_subquery())

    found = _in_documents(search_documents.c.id.in_(select(own.document_id).where(has(" & "))))
    if len(words) == 1:
        return found
    phrase = select(own.document_id).join_from(search_documents, search_words)
    phrase = phrase.where(search_documents.c.session_id == sessions.c.id, has(" <-> "))
    return and_(found, phrase.limit(1).correlate(sessions).scalar_subquery().is_not(None))


def says(text: str) -> ColumnElement[bool]:
    """Return the condition that the words of ``text`` follow each other in a session's texts.

    The last word, if it has three characters or more and ends the text, also stands for the longer
    words that begin so. A text without a letter or digit is in no digested session.
    """
    words = words_of(text)
    if not words:
        return _tail_says(text)
    end = "*" if open_ended(text) else ""
    indexed = _by_dialect(_by_fts5(words, end), _by_tsvector(words, end))
    return or_(indexed, _tail_says(text))


def _tail_says(asked: str) -> ColumnElement[bool]:
    """Return the condition that a session outside the index has the text in a message."""
    others = sessions.alias()
    newest = (
        select(others.c.id)
        .where(~is_indexed(others))
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
