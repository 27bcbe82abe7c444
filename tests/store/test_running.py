"""Requests of calls that run, and texts packed against tokens, through every way a session goes."""

import sqlite3

import numpy as np
import pytest
from bridle.store.encoding.vocabulary import Vocabulary
from sqlalchemy import func, select

from bridle.reconstruct.audit import audit_session
from bridle.store.encoding.packing import pack_ids
from bridle.store.operations.copying import copy_store
from bridle.store.operations.retention import forget
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus
from bridle.store.schema.database import connect, migrate, transaction
from bridle.store.schema.tables import bodies, running, spans, templates, vocabularies
from bridle.store.writing.writer import Writer

VOCABULARY = Vocabulary([b" word%d" % number for number in range(1000)])
OTHER = Vocabulary([b" other%d" % number for number in range(1000)])


@pytest.fixture
def writer(url):
    with Writer(url, vocabulary=VOCABULARY) as opened:
        yield opened


def say(ids, vocabulary=VOCABULARY):
    return "".join(f" word{number}" for number in ids)


class Line:
    """A session whose bodies and messages say what its tokens say."""

    def __init__(self, calls, writer, seed=0, first=None):
        self.calls = calls
        self.session = calls.session()
        self.random = np.random.default_rng(seed)
        self.prompt = self.take(200) if first is None else list(first.prompt)
        self.history = '{"messages":["' + say(self.prompt)
        self.parent = None
        self.made = []
        writer.create_session_sync(self.session)

    def take(self, count):
        return self.random.integers(0, 1000, count).tolist()

    def begin(self, writer, *, flush=False):
        begun = self.calls.begun(
            self.session,
            request_body=(self.history + '"]}').encode(),
            parent_call_id=self.parent,
            headers={"x-session-id": self.session.id},
        )
        writer.begin_call(begun)
        if flush:
            writer.update_session_sync(self.session.id, outcome=None)
        return begun

    def end(self, writer, begun):
        ids = self.take(40)
        ended = self.calls.ended(
            begun,
            self.prompt,
            ids,
            message={"role": "assistant", "content": say(ids)},
            conversation={"tail": [self.history[-300:]]},
            response_body="".join(f'data: {{"d":"{say([n])}","of":"a stream"}}\n\n' for n in ids)
            .encode(),
            sampling={"temperature": 1.0, "top": len(self.made) // 3},
        )  # fmt: skip
        writer.end_call_sync(ended)
        self.made.append((begun, ended))
        asked = self.take(60)
        self.history += f'","{say(ids)}","{say(asked)}'
        self.prompt = [*self.prompt, *ids, *asked]
        self.parent = begun.id

    def turn(self, writer, *, flush=False):
        self.end(writer, self.begin(writer, flush=flush))


def assert_exact(reader, line):
    rows = {row.id: row for row in reader.calls(line.session.id)}
    for begun, ended in line.made:
        for row in (rows[begun.id], reader.call(begun.id)):
            assert row.message == ended.message
            assert row.conversation == ended.conversation
            assert row.headers == begun.headers
            assert row.sampling == ended.sampling
            assert row.usage == ended.usage
        assert reader.request_body(begun.id) == begun.request_body
        assert reader.response_body(begun.id) == ended.response_body
        assert reader.prompt_token_ids(begun.id).tolist() == ended.prompt_token_ids.tolist()


def count(reader, table):
    with reader.engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


@pytest.mark.parametrize("flush", [False, True])
def test_everything_is_read_back_exactly_and_nothing_is_left_running(writer, reader, calls, flush):
    line = Line(calls, writer)
    for _ in range(6):
        line.turn(writer, flush=flush)
    assert_exact(reader, line)
    assert count(reader, running) == 0
    assert count(reader, bodies) == 1
    assert count(reader, vocabularies) == 1


def test_the_request_of_a_running_call_is_there_and_others_may_go_on_from_it(writer, reader, calls):
    line = Line(calls, writer)
    line.turn(writer)
    slow = line.begin(writer, flush=True)
    assert count(reader, running) == 1
    assert reader.request_body(slow.id) == slow.request_body
    assert reader.call(slow.id).message == {}
    beside = line.begin(writer, flush=True)
    line.end(writer, beside)
    assert reader.request_body(beside.id) == beside.request_body
    line.end(writer, slow)
    assert count(reader, running) == 0
    assert_exact(reader, line)


def test_a_call_that_never_ended_keeps_its_request(url, reader, calls):
    with Writer(url, vocabulary=VOCABULARY) as first:
        line = Line(calls, first)
        line.turn(first)
        line.turn(first)
        lost = line.begin(first, flush=True)
    assert reader.call(lost.id).status is CallStatus.INTERRUPTED
    assert reader.request_body(lost.id) == lost.request_body
    with Writer(url, vocabulary=VOCABULARY) as second:
        line.parent = lost.id
        line.turn(second)
        line.turn(second)
    assert reader.request_body(lost.id) == lost.request_body
    assert_exact(reader, line)


def test_a_session_that_was_let_go_of_between_begin_and_end_is_whole(url, reader, calls):
    with Writer(url, vocabulary=VOCABULARY, cache_bytes=0) as writer:
        line = Line(calls, writer)
        for _ in range(4):
            line.turn(writer, flush=True)
    assert_exact(reader, line)
    assert count(reader, running) == 0


def test_writers_with_other_vocabularies_take_turns_in_one_session(url, reader, calls):
    with (
        Writer(url, vocabulary=VOCABULARY) as one,
        Writer(url, vocabulary=OTHER) as two,
        Writer(url) as three,
    ):
        line = Line(calls, one)
        for number in range(9):
            line.turn((one, two, three)[number % 3])
    assert_exact(reader, line)
    assert count(reader, vocabularies) == 2


def test_a_first_request_is_stored_once_for_a_group_and_outlives_each_of_it(writer, reader, calls):
    first = Line(calls, writer, seed=1)
    second = Line(calls, writer, seed=2, first=first)
    for _ in range(3):
        first.turn(writer)
        second.turn(writer)
    assert first.made[0][0].request_body == second.made[0][0].request_body
    assert count(reader, bodies) == 1
    forget(reader.engine, [first.session.id])
    assert_exact(reader, second)
    assert count(reader, bodies) == 1
    forget(reader.engine, [second.session.id])
    for table in (bodies, running, templates):
        assert count(reader, table) == 0


def test_a_forgotten_session_takes_its_running_requests_with_it(writer, reader, calls):
    line = Line(calls, writer)
    line.turn(writer)
    line.begin(writer, flush=True)
    forget(reader.engine, [line.session.id])
    assert count(reader, running) == 0


def test_a_copy_reads_the_same_without_the_tokenizer(url, writer, calls, tmp_path):
    line = Line(calls, writer)
    for _ in range(4):
        line.turn(writer)
    line.begin(writer, flush=True)
    copy_store(url, str(tmp_path / "copy.db"))
    with Reader(str(tmp_path / "copy.db")) as copied:
        assert_exact(copied, line)
    with Writer(str(tmp_path / "copy.db")) as second, Reader(str(tmp_path / "copy.db")) as copied:
        line.turn(second)
        assert_exact(copied, line)


def test_what_was_forgotten_is_in_no_file_any_more(tmp_path, calls):
    url = str(tmp_path / "b.db")
    migrate(url)
    with Writer(url, vocabulary=VOCABULARY) as writer, Reader(url) as reader:
        line = Line(calls, writer)
        for _ in range(4):
            line.turn(writer, flush=True)
        with sqlite3.connect(url) as connection:
            kept = [
                row[0]
                for column, table in (("texts", "calls"), ("data", "templates"))
                for row in connection.execute(f"SELECT {column} FROM {table}")  # noqa: S608
            ]
        connection.close()
        assert len(kept) >= 5
        forget(reader.engine, [line.session.id])
    left = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert not any(value[-40:] in left for value in kept)


def test_the_tokens_text_is_not_stored_again(url, calls, tmp_path):
    sizes = {}
    for name, vocabulary in (("with", VOCABULARY), ("without", None)):
        path = str(tmp_path / f"{name}.db")
        migrate(path)
        with Writer(path, vocabulary=vocabulary) as writer:
            line = Line(calls, writer)
            for _ in range(8):
                line.turn(writer)
        with sqlite3.connect(path) as connection:
            (sizes[name],) = connection.execute("SELECT sum(length(texts)) FROM calls").fetchone()
        connection.close()
    assert sizes["with"] < 0.6 * sizes["without"]


@pytest.mark.damages_store
def test_texts_whose_tokens_were_changed_are_an_error_and_the_audit_says_so(
    url, writer, reader, calls
):
    line = Line(calls, writer)
    for _ in range(4):
        line.turn(writer)
    begun = line.made[2][0]
    engine = connect(url)
    with transaction(engine) as connection:
        this = (spans.c.call_id == begun.id) & (spans.c.choice == 0)
        connection.execute(spans.update().where(this).values(token_ids=pack_ids(line.take(40))))
    engine.dispose()
    with pytest.raises(ValueError, match="damaged"):
        dict(reader.call(begun.id).message)
    with pytest.raises(ValueError, match="damaged"):
        reader.response_body(begun.id)
    found = {violation.rule for violation in audit_session(reader, line.session.id, bodies=True)
             .violations}  # fmt: skip
    assert {"checksum_differs", "body_damaged"} <= found
