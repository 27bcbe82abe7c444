"""The index of the search: the words of sessions in documents, and their removal.

A document is a part of a session's texts, as long as PostgreSQL keeps the positions of words. It
is read in pieces, so that no message, however long, is in memory whole. Texts are those of the
table ``call_messages``, from which secrets were removed before they were written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import zstandard
from sqlalchemy import (
    Connection,
    Engine,
    Select,
    Text,
    bindparam,
    cast,
    delete,
    func,
    insert,
    select,
    text,
)

from bridle.store.encoding.words import words_of
from bridle.store.schema.database import in_pieces, transaction
from bridle.store.schema.derived import search_documents, search_words
from bridle.store.schema.tables import call_messages, calls

DOCUMENT: Final = 16_384
"""Characters of a document. PostgreSQL keeps the positions of as many words."""
_COLUMNS: Final = (
    (call_messages.c.content, False),
    (call_messages.c.content_json, True),
    (call_messages.c.tool_calls, True),
    (call_messages.c.reasoning, False),
)
"""The columns that are searched, and whether each is JSON."""
_CALL_IDS: Final = (
    select(calls.c.id)
    .where(calls.c.session_id == bindparam("session"))
    .order_by(calls.c.started_at, calls.c.id)
)
_CALLS_AT_ONCE: Final = 16
_TEXTS: Final = (
    select(
        call_messages.c.call_id,
        call_messages.c.choice,
        call_messages.c.position,
        *(func.substr(cast(column, Text), 1, DOCUMENT) for column, _ in _COLUMNS),
    )
    .where(call_messages.c.call_id.in_(bindparam("calls", expanding=True)))
    .order_by(call_messages.c.call_id, call_messages.c.choice, call_messages.c.position)
)
_REST: Final = [
    select(func.substr(cast(column, Text), bindparam("start"), DOCUMENT)).where(
        call_messages.c.call_id == bindparam("call"),
        call_messages.c.choice == bindparam("choice"),
        call_messages.c.position == bindparam("position"),
    )
    for column, _ in _COLUMNS
]
_DOCUMENTS: Final = select(search_documents.c.id).where(
    search_documents.c.session_id.in_(bindparam("sessions", expanding=True))
)
_WORDS: Final = select(search_words.c.document_id, search_words.c.words).where(
    search_words.c.document_id.in_(_DOCUMENTS)
)
_TO_INDEX: Final = "INSERT INTO search_index (rowid, words) VALUES (?, ?)"
_FROM_INDEX: Final = "INSERT INTO search_index (search_index, rowid, words) VALUES ('delete', ?, ?)"
_MERGE: Final = "INSERT INTO search_index (search_index, rank) VALUES ('merge', ?)"
_MERGED_PAGES: Final = 64
"""Pages of the index that one transaction merges."""
_TO_TSVECTOR: Final = text(
    "INSERT INTO search_words (document_id, words) VALUES (:id, to_tsvector('simple', :words))"
)


class Documents:
    """The documents of a session, read one by one in any number of transactions."""

    def __init__(self, connection: Connection, session_id: str) -> None:
        self._connection = connection
        self._documents = self._read(session_id)

    def next(self, connection: Connection) -> tuple[str, bool]:
        """Return the words of the next document, in the order of the calls.

        The second value is true for the last one, which is empty in a session without words.
        """
        self._connection = connection
        return next(self._documents)

    def _read(self, session_id: str) -> Iterator[tuple[str, bool]]:
        words: list[str] = []
        size = 0
        for piece in self._pieces(session_id):
            if size >= DOCUMENT:
                yield " ".join(words), False
                words, size = [], 0
            words += piece
            size += sum(map(len, piece)) + len(piece)
        yield " ".join(words), True

    def _pieces(self, session_id: str) -> Iterator[list[str]]:
        """Yield the words of each text of a session, those of a long text in pieces."""
        found = self._connection.execute(_CALL_IDS, {"session": session_id})
        ids = list(found.scalars())
        for start in range(0, len(ids), _CALLS_AT_ONCE):
            some = ids[start : start + _CALLS_AT_ONCE]
            rows = self._connection.execute(_TEXTS, {"calls": some}).all()
            order = {call_id: place for place, call_id in enumerate(some)}
            for call_id, choice, position, *texts in sorted(rows, key=lambda row: order[row[0]]):
                place = {"call": call_id, "choice": choice, "position": position}
                for (_, json), rest, piece in zip(_COLUMNS, _REST, texts, strict=True):
                    if piece:
                        yield words_of(_text(piece), json=json)
                    if piece and len(piece) >= DOCUMENT:
                        yield from self._rest(rest, place, json=json)

    def _rest(
        self, query: Select[Any], place: dict[str, Any], *, json: bool
    ) -> Iterator[list[str]]:
        """Yield the words of the rest of a text that is longer than a document."""
        start = 1 + DOCUMENT
        while piece := self._connection.execute(query, place | {"start": start}).scalar():
            yield words_of(_text(piece), json=json)
            start += DOCUMENT


def _text(value: Any) -> str:
    """Return a text of the database, also where it is damaged."""
    return value if isinstance(value, str) else bytes(value).decode(errors="replace")


def add_document(connection: Connection, session_id: str, words: str, *, is_last: bool) -> None:
    row = {"session_id": session_id, "last": is_last or None}
    added = connection.execute(insert(search_documents).values(row))
    (identifier,) = added.inserted_primary_key or (None,)
    if connection.dialect.name == "postgresql":
        connection.execute(_TO_TSVECTOR, {"id": identifier, "words": words})
        return
    packed = zstandard.compress(words.encode())
    connection.execute(insert(search_words).values(document_id=identifier, words=packed))
    connection.exec_driver_sql(_TO_INDEX, (identifier, words))


def remove_documents(connection: Connection, session_ids: Sequence[str]) -> int:
    """Remove the documents of these sessions, and return their number."""
    removed = 0
    for some in map(list, in_pieces(session_ids)):
        given = {"sessions": some}
        if connection.dialect.name == "sqlite":
            for identifier, packed in connection.execute(_WORDS, given).all():
                words = zstandard.decompress(packed).decode()
                connection.exec_driver_sql(_FROM_INDEX, (identifier, words))
        theirs = search_words.c.document_id.in_(_DOCUMENTS)
        connection.execute(delete(search_words).where(theirs), given)
        own = search_documents.c.session_id.in_(some)
        removed += connection.execute(delete(search_documents).where(own)).rowcount
    return removed


def purge_words(engine: Engine) -> None:
    """Take the words of removed documents out of the pages of SQLite's index.

    FTS5 only marks a removed word until it merges the parts of the index that have it. They are
    merged here in small transactions, so that calls are written in between.
    """
    if engine.dialect.name != "sqlite":
        return
    pages = -_MERGED_PAGES
    while True:
        with transaction(engine) as connection:
            connection.exec_driver_sql("PRAGMA secure_delete=ON")
            before = connection.exec_driver_sql("SELECT total_changes()").scalar_one()
            connection.exec_driver_sql(_MERGE, (pages,))
            after = connection.exec_driver_sql("SELECT total_changes()").scalar_one()
        if after - before < 2:
            return
        pages = _MERGED_PAGES
