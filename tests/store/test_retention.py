"""Forgetting sessions, and copies of the store."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select, text
from tests.conftest import now

from bridle.store.errors import NotFound, StoreUnavailable
from bridle.store.operations.copying import NotEmpty, backup, copy_store
from bridle.store.operations.retention import forget, older_than
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus, Conversation, Message, TaskRecord
from bridle.store.reward import Reward
from bridle.store.schema.database import connect, migrate, transaction
from bridle.store.schema.derived import session_totals
from bridle.store.schema.tables import bodies, metadata, writers
from bridle.store.writing.sums import summarize
from bridle.store.writing.writer import Writer

SECRET = b"the-secret-of-the-first-session"


def record(writer, calls, turns=3, marker=b"", **session):
    """A session whose requests repeat their history; every reply says the marker."""
    made = calls.session(**session)
    writer.add_sync(made)
    history, prompt, parent, made_calls = b'{"messages":[', list(range(30)), None, []
    for turn in range(turns):
        history += b'"%s turn %d %s",' % (b"shared words " * 40, turn, marker)
        begun = calls.begun(
            made,
            request_body=history + b"]}",
            parent_call_id=parent,
            conversation=Conversation((Message("user", history.decode()),), length=1),
        )
        ended = calls.ended(begun, prompt, [turn, 7], response_body=b"reply %d %s" % (turn, marker))
        writer.begin_call(begun)
        writer.end_call_sync(ended)
        made_calls.append((begun, ended))
        prompt, parent = [*prompt, turn, 7, 9], begun.id
    writer.add_sync(Reward(made.id, "solved", 1.0, now()))
    return made, made_calls


def assert_readable(reader, made_calls):
    for begun, ended in made_calls:
        row = reader.call(begun.id)
        assert reader.request_body(row.id) == begun.request_body
        assert reader.response_body(row.id) == ended.response_body
        assert (row.conversation, row.replies) == (begun.conversation, ended.replies)
        assert reader.prompt_token_ids(begun.id).tolist() == ended.prompt_token_ids.tolist()
        assert reader.sampled(begun.id)[0].logprobs.tobytes() == ended.choices[0].logprobs.tobytes()


def rows(url):
    """Every row of every table but the writers', as the database has them."""
    engine = connect(url)
    with engine.connect() as connection:
        found = {
            table.name: sorted([tuple(row) for row in connection.execute(select(table))], key=repr)
            for table in metadata.sorted_tables
            if table is not writers
        }
    engine.dispose()
    return found


def test_a_forgotten_session_is_gone_and_the_others_are_whole(url, writer, reader, calls):
    gone, gone_calls = record(writer, calls, marker=SECRET)
    kept, kept_calls = record(writer, calls)
    found = forget(reader.engine, [gone.id, "session_unknown"])
    assert (found.sessions, found.calls) == (1, 3)
    with pytest.raises(NotFound):
        reader.session(gone.id)
    with pytest.raises(NotFound):
        reader.call(gone_calls[0][0].id)
    assert reader.spans(gone.id) == []
    assert reader.rewards(gone.id) == []
    assert_readable(reader, kept_calls)
    assert reader.rewards(kept.id)[0].value == 1.0


def test_forgetting_everything_leaves_no_body(url, writer, reader, calls):
    made = [record(writer, calls, marker=b"%d" % number)[0].id for number in range(3)]
    forget(reader.engine, made)
    with reader.engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(bodies)).scalar() == 0


def test_sums_that_are_being_written_keep_no_session(url, writer, calls):
    made, _ = record(writer, calls)
    mine, theirs = connect(url), connect(url, writes=True)
    with ThreadPoolExecutor(1) as thread:
        with transaction(theirs) as connection:
            summarize(connection, [made.id])
            forgetting = thread.submit(forget, mine, [made.id])
            time.sleep(0.5)  # it waits for this transaction
            assert not forgetting.done()
        assert forgetting.result(30).sessions == 1
    with mine.connect() as connection:
        assert connection.execute(select(session_totals)).all() == []
    mine.dispose()
    theirs.dispose()


def test_old_sessions_are_found_but_for_those_with_running_calls(url, writer, reader, calls):
    old, _ = record(writer, calls, created_at=1000.0)
    running = calls.session(created_at=1000.0)
    writer.add_sync(running)
    writer.begin_call(calls.begun(running))
    record(writer, calls)
    with reader.engine.connect() as connection:
        assert older_than(connection, 2000.0) == [old.id]


def test_a_call_that_ends_after_its_session_was_forgotten_is_refused(url, writer, reader, calls):
    made = calls.session()
    writer.add_sync(made)
    begun = calls.begun(made)
    writer.begin_call(begun)
    writer.update_session_sync(made.id, outcome=None)
    forget(reader.engine, [made.id])
    with pytest.raises(StoreUnavailable):
        writer.end_call_sync(calls.ended(begun, [1], [2]))


def test_a_copy_is_exact_and_may_be_written_on(url, writer, calls, tmp_path):
    made, made_calls = record(writer, calls)
    writer.add_sync(TaskRecord("t", "s", "train", {"a": [1, None, 0.1]}, 1.5))
    target = str(tmp_path / "copy.db")
    copied = copy_store(url, target)
    assert copied["calls"] == 3
    assert rows(target) == rows(url)
    with Writer(target) as second, Reader(target) as reader:
        assert_readable(reader, made_calls)
        record(second, calls)
        assert reader.session(made.id) == made


@pytest.mark.postgres
def test_a_store_goes_to_postgresql_and_comes_back_the_same(tmp_path, postgres, calls):
    first, last, server = str(tmp_path / "a.db"), str(tmp_path / "b.db"), postgres.empty_database()
    migrate(first)
    with Writer(first) as writer:
        record(writer, calls)
        record(writer, calls, marker=SECRET)
    copy_store(first, server)
    copy_store(server, last)
    assert rows(first) == rows(server) == rows(last)


def test_a_store_that_holds_something_is_no_target(url, writer, calls, tmp_path):
    record(writer, calls)
    other = str(tmp_path / "other.db")
    copy_store(url, other)
    with pytest.raises(NotEmpty):
        copy_store(url, other)


def test_a_backup_holds_every_call_that_was_acknowledged_before_it_began(url, calls, tmp_path):
    said, stop = [], threading.Event()
    with Writer(url) as writer:

        def work():
            while not stop.is_set():
                said.extend(begun.id for begun, _ in record(writer, calls)[1])

        thread = threading.Thread(target=work)
        thread.start()
        try:
            while len(said) < 6:
                time.sleep(0.01)
            before = list(said)
            size = backup(url, tmp_path / "backup.db")
        finally:
            stop.set()
            thread.join()
    assert size == (tmp_path / "backup.db").stat().st_size
    assert [file.name for file in tmp_path.glob("backup*")] == ["backup.db"]
    with Reader(str(tmp_path / "backup.db")) as reader:
        for call_id in before:
            call = reader.call(call_id)
            assert call.status is CallStatus.COMPLETE
            reader.request_body(call.id)
            reader.prompt_token_ids(call_id)


def test_a_backup_never_replaces_a_file(url, tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(FileExistsError):
        backup(url, tmp_path / "kept")
    assert (tmp_path / "kept").read_text() == "mine"


@pytest.mark.damages_store
def test_a_backup_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "no.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreUnavailable, match="file is not a database"):
        backup(str(tmp_path / "no.db"), tmp_path / "b.db")
    assert [file.name for file in tmp_path.iterdir()] == ["no.db"]
    with pytest.raises(StoreUnavailable):
        backup(str(tmp_path / "missing.db"), tmp_path / "b.db")


@pytest.mark.parametrize("schema", ["0005", "9999"])
def test_a_store_of_another_version_is_not_copied(url, tmp_path, schema):
    """Its columns are not those that are read: the copy would lose some, or never be made."""
    engine = connect(url)
    with transaction(engine) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :v"), {"v": schema})
    engine.dispose()
    target = tmp_path / "copy.db"
    with pytest.raises(StoreUnavailable, match=f"its schema is {schema}, not "):
        copy_store(url, str(target))
    assert not target.exists()
