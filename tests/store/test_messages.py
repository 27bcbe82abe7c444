"""Test the content of calls, in columns and in exact bodies, in every course of a session."""

import json
import sqlite3

import orjson
import pytest
from sqlalchemy import func, select

from bridle.reconstruct.audit import audit_session
from bridle.store.operations.copying import copy_store
from bridle.store.operations.retention import forget
from bridle.store.reading.queries import Reader
from bridle.store.records import (
    CallStatus,
    Conversation,
    LineageState,
    Message,
    RequestDigests,
    ToolCall,
)
from bridle.store.schema.database import connect, migrate, transaction
from bridle.store.schema.tables import bodies, call_messages, tool_sets
from bridle.store.schema.tables import calls as calls_table
from bridle.store.writing.writer import Writer

TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},)


class Line:
    """A session whose harness sends its whole history with every call."""

    def __init__(self, calls, writer):
        self.calls = calls
        self.session = calls.session()
        self.history = [Message("system", "be brief " * 20)]
        self.tail = [*self.history, Message("user", "what is there?")]
        self.history = list(self.tail)
        self.parent = None
        self.made = []
        writer.add_sync(self.session)

    def begin(self, writer, *, flush=False):
        digests = RequestDigests(b"s", b"f", b"tools", b"a", (b"u",), (b"f",), len(self.history))
        body = {"tools": TOOLS, "messages": [message.to_chat() for message in self.history]}
        begun = self.calls.begun(
            self.session,
            request_body=orjson.dumps(body),
            parent_call_id=self.parent,
            headers={"x-session-id": self.session.id},
            conversation=Conversation(
                tuple(self.tail),
                TOOLS,
                len(self.history),
                lineage=LineageState(digests, self.parent, differs=("spaces",), confidence=0.5),
            ),
        )
        writer.begin_call(begun)
        if flush:
            writer.update_session_sync(self.session.id, outcome=None)
        return begun

    def end(self, writer, begun):
        number = len(self.made)
        call = ToolCall(f"call_{number}", "look", json.dumps({"at": f"folder {number}\n"}))
        reply = Message("assistant", f"I look at {number}.", "hm", (call,))
        pieces = [b'data: {"delta":"%d%c"}\n\n' % (number, letter) for letter in b"I look"]
        ended = self.calls.ended(
            begun,
            [1, 2, number],
            [3, number],
            replies=(reply,),
            response_body=b"".join(pieces),
            sampling={"temperature": 1.0, "top_k": None},
        )
        writer.end_call_sync(ended)
        self.made.append((begun, ended))
        result = Message("tool", f"files of {number}\n" * 30, tool_call_id=call.id)
        self.tail = [result]
        self.history += [reply, result]
        self.parent = begun.id

    def turn(self, writer, *, flush=False):
        self.end(writer, self.begin(writer, flush=flush))


def assert_exact(reader, line):
    rows = {row.id: row for row in reader.calls(line.session.id)}
    for begun, ended in line.made:
        for row in (rows[begun.id], reader.call(begun.id)):
            assert row.conversation == begun.conversation
            assert row.replies == ended.replies
            assert row.headers == begun.headers
            assert row.sampling == ended.sampling
            assert row.usage == ended.usage
        assert reader.request_body(begun.id) == begun.request_body
        assert reader.response_body(begun.id) == ended.response_body


def count(reader, table):
    with reader.engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


@pytest.mark.parametrize("flush", [False, True])
def test_everything_is_read_back_exactly_and_stored_once(writer, reader, calls, flush):
    line = Line(calls, writer)
    for _ in range(6):
        line.turn(writer, flush=flush)
    assert_exact(reader, line)
    assert count(reader, call_messages) == 2 + 6 + 5
    assert count(reader, tool_sets) == 1


def test_messages_stand_at_their_place_in_the_conversation(writer, reader, calls):
    line = Line(calls, writer)
    for _ in range(2):
        line.turn(writer)
    order = call_messages.c.position
    with reader.engine.connect() as connection:
        found = connection.execute(select(order, call_messages.c.role).order_by(order)).all()
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [tuple(row) for row in found] == list(enumerate(roles))


def test_a_running_call_can_be_read_and_others_may_continue_it(writer, reader, calls):
    line = Line(calls, writer)
    line.turn(writer)
    slow = line.begin(writer, flush=True)
    assert reader.request_body(slow.id) == slow.request_body
    row = reader.call(slow.id)
    assert (row.conversation, row.replies) == (slow.conversation, ())
    beside = line.begin(writer, flush=True)
    line.end(writer, beside)
    assert reader.request_body(beside.id) == beside.request_body
    line.end(writer, slow)
    line.turn(writer)
    assert_exact(reader, line)


def test_a_call_that_never_ended_keeps_its_request_and_its_messages(url, reader, calls):
    with Writer(url) as first:
        line = Line(calls, first)
        line.turn(first)
        line.turn(first)
        lost = line.begin(first, flush=True)
    row = reader.call(lost.id)
    assert (row.status, row.conversation) == (CallStatus.INTERRUPTED, lost.conversation)
    assert reader.request_body(lost.id) == lost.request_body
    with Writer(url) as second:
        line.parent = lost.id
        line.turn(second)
        line.turn(second)
    assert_exact(reader, line)


def test_a_session_that_was_dropped_from_memory_between_begin_and_end_is_whole(url, reader, calls):
    with Writer(url, cache_bytes=0) as writer:
        line = Line(calls, writer)
        for _ in range(4):
            line.turn(writer, flush=True)
    assert_exact(reader, line)


def test_writers_take_turns_in_one_session(url, reader, calls):
    with Writer(url) as one, Writer(url) as two:
        line = Line(calls, one)
        for number in range(8):
            line.turn((one, two)[number % 2], flush=number % 3 == 0)
    assert_exact(reader, line)
    assert count(reader, tool_sets) == 1


def test_tools_that_mean_the_same_may_be_written_otherwise(url, reader, calls):
    """The digest of the tools is lineage's, which is blind to the order of keys."""
    with Writer(url) as writer:
        line = Line(calls, writer)
        line.turn(writer)
        other = tuple(dict(reversed(tool.items())) for tool in TOOLS)
        digests = RequestDigests(b"s", b"f", b"tools", b"a", (), (), 1)
        begun = calls.begun(
            line.session,
            request_body=b"nothing alike " * 40 + orjson.dumps(other),
            conversation=Conversation((), other, lineage=LineageState(digests)),
        )
        writer.begin_call(begun)
        writer.end_call_sync(calls.ended(begun, [7], [8]))
    assert reader.request_body(begun.id) == begun.request_body
    assert_exact(reader, line)


@pytest.mark.parametrize(
    "message",
    [
        Message("user", [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]),
        Message("tool", "a NUL \0 in it", tool_call_id="call_1"),
        Message("assistant", "", "", ()),
        Message("system", None, name="n"),
        Message("user", 'é "quoted" \\ \n\t\x1b 🜚'),
    ],
)
def test_messages_of_every_kind_come_back(writer, reader, calls, message):
    session = calls.session()
    writer.add_sync(session)
    begun = calls.begun(session, conversation=Conversation((message,), length=1))
    writer.begin_call(begun)
    writer.end_call_sync(calls.ended(begun, [1], [2], replies=(message,)))
    row = reader.call(begun.id)
    assert (row.conversation.tail, row.replies) == ((message,), (message,))
    assert reader.request_body(begun.id) == begun.request_body
    assert reader.response_body(begun.id)


def test_what_only_text_can_hold_is_stored_without_nul(writer, reader, calls):
    session = calls.session()
    writer.add_sync(session)
    begun = calls.begun(session)
    writer.begin_call(begun)
    reply = Message("assistant", None, "a\0b", (ToolCall("call_1", "f", "{\0}"),))
    body = b"the client was sent a\0b" * 9
    writer.end_call_sync(calls.ended(begun, [1], [2], replies=(reply,), response_body=body))
    (found,) = reader.call(begun.id).replies
    assert (found.reasoning, found.tool_calls[0].arguments) == ("a\ufffdb", "{\ufffd}")
    assert reader.response_body(begun.id) == body


def test_a_value_that_is_missing_is_null(writer, reader, calls):
    session = calls.session()
    writer.add_sync(session)
    begun = calls.begun(session)
    writer.begin_call(begun)
    writer.end_call_sync(calls.ended(begun, [1], [2]))
    columns = [calls_table.c[name] for name in ("sampling", "error", "notes", "digests")]
    with reader.engine.connect() as connection:
        nulls = [column.is_(None) for column in columns]
        assert connection.execute(select(*nulls)).one() == (True, True, True, True)


def test_bodies_are_next_to_nothing_beside_the_messages(writer, reader, calls):
    line = Line(calls, writer)
    for _ in range(10):
        line.turn(writer)
    with reader.engine.connect() as connection:
        stored = connection.execute(select(func.sum(func.length(bodies.c.data)))).scalar_one()
    sent = sum(len(b.request_body) + len(e.response_body) for b, e in line.made)
    assert stored < sent / 10


def test_a_copy_reads_the_same_and_may_be_written_on(url, writer, calls, tmp_path):
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
    with Writer(url) as writer, Reader(url) as reader:
        line = Line(calls, writer)
        for _ in range(4):
            line.turn(writer, flush=True)
        with sqlite3.connect(url) as connection:
            kept = [row[0] for row in connection.execute("SELECT data FROM bodies")]
            kept += [text.encode() for (text,) in connection.execute(
                "SELECT content FROM call_messages"
            )]  # fmt: skip
        connection.close()
        assert len(kept) >= 12
        forget(reader.engine, [line.session.id])
    left = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert not any(value[-40:] in left for value in kept)


@pytest.mark.damages_store
def test_a_changed_message_is_found_by_the_bodies_that_quote_it(url, writer, reader, calls):
    line = Line(calls, writer)
    for _ in range(4):
        line.turn(writer)
    begun = line.made[2][0]
    engine = connect(url)
    with transaction(engine) as connection:
        this = (call_messages.c.call_id == begun.id) & (call_messages.c.role == "tool")
        connection.execute(call_messages.update().where(this).values(content="other files"))
    engine.dispose()
    with pytest.raises(ValueError, match=r"damaged|does not have"):
        reader.request_body(begun.id)
    found = audit_session(reader, line.session.id, bodies=True).violations
    assert {violation.rule for violation in found} == {"body_damaged"}
