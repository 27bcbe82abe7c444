"""The search, the stored sums and what becomes of both when sessions change or are deleted."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import event, select, update
from sqlalchemy.engine import Engine

from bridle.diagnosis.pages import session_ids
from bridle.reconstruct.verdicts import judge
from bridle.store.encoding.words import open_ended, words_of
from bridle.store.operations.retention import forget
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter
from bridle.store.records import CallKind, Conversation, Message, SessionRecord, ToolCall, new_id
from bridle.store.schema.database import migrate, transaction
from bridle.store.schema.derived import DERIVED, session_counts, session_totals
from bridle.store.schema.tables import sessions
from bridle.store.writing.digest import lacking
from bridle.store.writing.redaction import Redactor
from bridle.store.writing.search_index import add_document
from bridle.store.writing.sums import summarize
from bridle.store.writing.writer import Writer
from support.processes import until


def record(writer: Writer, calls: Any, *texts: str, sealed: bool = True, **fields: Any) -> str:
    """A session with a call for each text; digested if it is sealed."""
    session = SessionRecord(new_id("session"), time.time(), **fields)
    writer.add_sync(session)
    for text in texts:
        said = Conversation((Message("user", text),), length=1)
        begun = calls.begun(session.id, conversation=said)
        writer.begin_call(begun)
        writer.end_call_sync(calls.ended(begun, [1, 2], [3, 4]))
    if sealed:
        writer.update_session_sync(session.id, sealed_at=time.time(), outcome="completed")
        until(lambda: not writer.digesting)
    return session.id


def found(reader: Reader, text: str, **conditions: Any) -> list[str]:
    return session_ids(reader, SessionFilter(text=text, **conditions))


@pytest.fixture
def writer(url: str) -> Any:
    with Writer(url) as made:
        yield made


@pytest.fixture
def reader(url: str) -> Any:
    with Reader(url) as made:
        yield made


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Mend src/app.py, now!", ["mend", "src", "app", "py", "now"]),
        ("run_shell_command(x1)", ["run", "shell", "command", "x1"]),
        ("ÄRGER über 東京", ["ärger", "über", "東", "京"]),
        ("%_-", []),
        ("z" * 100, ["z" * 64]),
    ],
)
def test_words_are_runs_of_letters_and_digits(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_escapes_of_json_are_not_part_of_a_word() -> None:
    assert words_of(r'{"text":"one\ntwo \"three\" \\n\u0007four"}', json=True) == [
        *("text", "one", "two", "three", "four")
    ]


def test_the_end_of_a_query_is_open_unless_something_follows_it() -> None:
    assert [open_ended(text) for text in ("the lam", "the lam ", "x", "a-1:", "")] == [
        *(True, False, False, False, False)
    ]


def test_sealed_sessions_are_found_by_the_words_of_every_column(
    writer: Writer, reader: Reader, calls: Any
) -> None:
    session = record(writer, calls, "Mend the Lantern, and then the lighthouse.")
    parts = [{"type": "text", "text": "line one\nwindmill"}]
    other = SessionRecord(new_id("session"), time.time())
    writer.add_sync(other)
    begun = calls.begun(other, conversation=Conversation((Message("user", parts),), length=1))
    tool = ToolCall("t1", "run_shell", '{"command": "grep -n dynamo"}')
    said = Message("assistant", "done", reasoning="Think of the turbine", tool_calls=(tool,))
    writer.begin_call(begun)
    writer.end_call_sync(calls.ended(begun, [1, 2], [3], replies=(said,)))
    for sealed in (False, True):
        if sealed:
            writer.update_session_sync(other.id, sealed_at=time.time(), outcome="completed")
            until(lambda: not writer.digesting)
        for text in ("windmill", "DYNAMO", "the turbine", "grep -n dyn"):
            assert found(reader, text) == [other.id], (sealed, text)
    for text in ("the lantern", "LIGHTHOUSE", "lantern, and then", "light", "mend the lant"):
        assert found(reader, text) == [session], text
    for text in ("lantern the", "antern", "zebra", "light ", "%"):
        assert found(reader, text) == [], text


def test_long_texts_are_found_at_their_ends(writer: Writer, reader: Reader, calls: Any) -> None:
    text = "first " + "filler words of no use " * 5_000 + " the very last"
    session = record(writer, calls, text)
    assert found(reader, "the very last") == found(reader, "first filler") == [session]


def test_a_deleted_session_leaves_no_word_behind(
    url: str, writer: Writer, reader: Reader, calls: Any
) -> None:
    gone = record(writer, calls, "the unspeakableword is here")
    kept = record(writer, calls, "the other word is here")
    assert found(reader, "unspeakableword") == [gone]
    forget(reader.engine, [gone])
    assert found(reader, "unspeakableword") == []
    assert found(reader, "the other word") == [kept]
    with reader.engine.connect() as connection:
        for table in DERIVED:
            if "session_id" in table.c:
                of = select(table.c.session_id).distinct()
                assert set(connection.execute(of).scalars()) <= {kept}
        if connection.dialect.name == "sqlite":
            blocks = connection.exec_driver_sql("SELECT block FROM search_index_data").scalars()
            assert not any(b"unspeakable" in block for block in blocks)
    if not url.startswith("postgresql"):
        writer.close()
        with open(url, "rb") as file:
            assert b"unspeakable" not in file.read()


def test_secrets_are_not_in_the_index(url: str, reader: Reader, calls: Any) -> None:
    secret = "hf_" + "aB3" * 12
    with Writer(url, redactor=Redactor()) as writer:
        session = record(writer, calls, f"my token is {secret} and that is it")
    assert found(reader, secret) == []
    assert found(reader, "my token is") == [session]
    if not url.startswith("postgresql"):
        with closing(sqlite3.connect(url)) as connection:
            blocks = connection.execute("SELECT block FROM search_index_data").fetchall()
        assert not any(secret[3:].lower().encode() in block for (block,) in blocks)


def test_a_call_in_a_sealed_session_is_counted_and_found_at_once(
    writer: Writer, reader: Reader, calls: Any
) -> None:
    session = record(writer, calls, "first words")
    begun = calls.begun(session, conversation=Conversation((Message("user", "late"),), length=1))
    writer.begin_call(begun)
    writer.update_session_sync(session, labels={})  # the beginning is in the store
    assert totals(reader, session) is None
    until(lambda: not writer.digesting)
    assert totals(reader, session) is None, "a call still runs"
    assert found(reader, "late") == [session]
    writer.end_call_sync(calls.ended(begun, [1, 2], [3, 4]))
    until(lambda: totals(reader, session) is not None)
    assert totals(reader, session).calls == 2
    assert found(reader, "late") == found(reader, "first words") == [session]


def test_sums_follow_the_verdicts_and_a_persons_decision(
    writer: Writer, reader: Reader, calls: Any
) -> None:
    session = record(writer, calls, "one", "two")
    assert kinds(reader, session).keys() != {"side"}
    for call_id in reader.call_ids(session):
        writer.set_kind_sync(call_id, CallKind.SIDE, by="a person")
    judge(reader, session)
    until(lambda: not writer.digesting)
    assert kinds(reader, session) == {"side": 2}
    assert session_ids(reader, SessionFilter(kind="side")) == [session]


def test_another_process_digests_what_was_left(url: str, reader: Reader, calls: Any) -> None:
    with Writer(url) as writer:
        session = record(writer, calls, "left behind")
    with transaction(reader.engine) as connection:
        connection.execute(session_totals.delete())
        assert lacking(connection) == [session]
    assert found(reader, "left behind") == [session]
    with Writer(url) as writer:
        until(lambda: not writer.digesting)
    with reader.engine.connect() as connection:
        assert lacking(connection) == []


def test_a_failing_digest_leaves_the_session_readable(
    url: str, reader: Reader, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no sums today")

    monkeypatch.setattr("bridle.store.writing.digest.summarize", broken)
    with Writer(url) as writer:
        session = record(writer, calls, "still readable")
        other = record(writer, calls, "and writable")
    assert found(reader, "still readable") == [session]
    assert found(reader, "and writable") == [other]
    with reader.engine.connect() as connection:
        assert set(lacking(connection)) == {session, other}


def test_a_session_that_cannot_be_summed_leaves_the_others_their_sums(
    url: str, reader: Reader, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Writer(url) as writer:
        several = [record(writer, calls, f"text {number}", sealed=False) for number in range(5)]
    with transaction(reader.engine) as connection:
        connection.execute(update(sessions).values(sealed_at=1.0, outcome="completed"))

    def broken(connection: Any, some: list[str]) -> None:
        if several[2] in some:
            raise ValueError("no sums today")
        summarize(connection, some)

    monkeypatch.setattr("bridle.store.writing.digest.summarize", broken)
    with Writer(url) as writer:
        until(lambda: not writer.digesting)
    with reader.engine.connect() as connection:
        assert lacking(connection) == [several[2]]
    assert found(reader, "text") == several


def test_a_text_that_cannot_be_indexed_costs_no_sums(
    url: str, reader: Reader, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any, __: str, words: str, *, is_last: bool) -> None:
        if "unreadable" in words:
            raise ValueError("no words today")
        add_document(_, __, words, is_last=is_last)

    monkeypatch.setattr("bridle.store.writing.digest.add_document", broken)
    with Writer(url) as writer:
        session = record(writer, calls, "unreadable")
        other = record(writer, calls, "and readable")
    assert totals(reader, session) is not None
    assert totals(reader, other) is not None
    assert found(reader, "unreadable") == [session]
    assert found(reader, "and readable") == [other]
    with reader.engine.connect() as connection:
        assert lacking(connection) == [session]


def totals(reader: Reader, session: str) -> Any:
    with reader.engine.connect() as connection:
        own = session_totals.c.session_id == session
        return connection.execute(select(session_totals).where(own)).first()


def kinds(reader: Reader, session: str) -> dict[str, int]:
    own = session_counts.c
    query = select(own.value, own.number).where(own.session_id == session, own.name == "kind")
    with reader.engine.connect() as connection:
        return {row.value: row.number for row in connection.execute(query)}


@pytest.mark.postgres
def test_common_words_are_found_without_their_positions(postgres: Any, calls: Any) -> None:
    """However common a word is, PostgreSQL looks it up and does not read every document."""
    url = postgres.empty_database()
    migrate(url)
    with Writer(url) as writer, Reader(url) as reader:
        sessions = [record(writer, calls, "the end of the story")]
        alone = reader.engine.execution_options(isolation_level="AUTOCOMMIT")
        with alone.connect() as connection:
            for more in (
                "INSERT INTO search_documents (session_id)"
                " SELECT session_id FROM search_documents, generate_series(1, 5000)",
                "INSERT INTO search_words SELECT search_documents.id, words"
                " FROM search_documents, search_words ON CONFLICT DO NOTHING",
                "VACUUM ANALYZE",
            ):
                connection.exec_driver_sql(more)
        plans: list[str] = []

        def explain(_: Any, cursor: Any, statement: str, given: Any, *__: Any) -> None:
            if "search_words" in statement:
                own = cursor.connection.cursor()
                plans.extend(row[0] for row in own.execute(f"EXPLAIN {statement}", given))

        event.listen(Engine, "before_cursor_execute", explain)
        try:
            assert found(reader, "the ") == sessions
        finally:
            event.remove(Engine, "before_cursor_execute", explain)
        assert found(reader, "of the") == sessions
        assert found(reader, "the of") == []
    assert any("Bitmap Index Scan on ix_search_words_words" in line for line in plans)
    assert not [line for line in plans if "Seq Scan on search_words" in line]
