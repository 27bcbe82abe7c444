"""Test the writer with a database that does not do its part."""

import asyncio
import os
import sqlite3
import threading
import time

import psycopg
import pytest
from sqlalchemy import Engine, event

from bridle.store.errors import StoreUnavailable
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus
from bridle.store.reward import Reward
from bridle.store.schema.database import connect, migrate
from bridle.store.writing.writer import Writer


@pytest.fixture
def path(tmp_path):
    address = str(tmp_path / "bridle.db")
    migrate(address)
    return address


@pytest.fixture
def impatient(monkeypatch):
    """SQLite reports a lock at once instead of after seconds."""
    monkeypatch.setattr("bridle.store.writing.writer._BUSY_S", 0.05)


class Lock:
    """Another process in a long write transaction."""

    def __init__(self, path):
        self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def __enter__(self):
        self.connection.execute("BEGIN IMMEDIATE")
        return self

    def __exit__(self, *_):
        self.connection.rollback()
        self.connection.close()


async def recorded(writer, session, calls, prompt=(1, 2), reply=(3,)):
    begun = calls.begun(session)
    writer.begin_call(begun)
    await writer.end_call(calls.ended(begun, list(prompt), list(reply)))
    return begun


async def test_a_locked_database_is_waited_for(path, calls, impatient):
    with Writer(path) as writer, Reader(path) as reader:
        session = calls.session()
        await writer.add(session)
        with Lock(path):
            wait = asyncio.ensure_future(recorded(writer, session, calls))
            await asyncio.sleep(0.3)
            assert not wait.done()
        begun = await wait
        assert reader.call(begun.id).status is CallStatus.COMPLETE
        assert writer.stats.retries >= 1


async def test_a_database_locked_for_too_long_refuses_and_recovers(path, calls, impatient):
    with Writer(path, patience=0.2) as writer, Reader(path) as reader:
        session = calls.session()
        await writer.add(session)
        first = await recorded(writer, session, calls)
        with Lock(path), pytest.raises(StoreUnavailable, match="locked"):
            await recorded(writer, session, calls, (1, 2, 3, 4), (5,))
        assert writer.stats.failed >= 1
        last = await recorded(writer, session, calls, (1, 2, 3, 4, 6), (7,))
        assert reader.prompt_token_ids(last.id).tolist() == [1, 2, 3, 4, 6]
        statuses = [call.status for call in reader.calls(session.id)]
        assert statuses.count(CallStatus.COMPLETE) == 2
        assert reader.call(first.id).status is CallStatus.COMPLETE


async def test_each_record_waits_for_a_locked_store_as_long_as_its_own_patience(
    path, calls, impatient
):
    """A record that is handed over while another waits does not wait for the end of both."""
    with Writer(path, patience=1.0) as writer:
        session = calls.session()
        await writer.add(session)
        waited = []

        async def record():
            begun = time.monotonic()
            with pytest.raises(StoreUnavailable, match="locked"):
                await writer.add(calls.session())
            waited.append(time.monotonic() - begun)

        with Lock(path):
            running = []
            for _ in range(6):
                running.append(asyncio.ensure_future(record()))
                await asyncio.sleep(0.3)
            assert not writer.well
            await asyncio.gather(*running)
        await writer.add(calls.session())
        assert writer.well
    assert len(waited) == 6
    assert max(waited) < 1.9


async def test_a_full_disk_refuses_at_once_and_recovers(path, calls):
    pages = 0

    def limit(connection, _record):
        if pages:
            connection.execute(f"PRAGMA max_page_count={pages}")

    event.listen(Engine, "connect", limit)
    try:
        with sqlite3.connect(path) as connection:
            pages = connection.execute("PRAGMA page_count").fetchone()[0] + 40
        with Writer(path) as writer, Reader(path) as reader:
            session = calls.session()
            await writer.add(session)
            kept = []

            async def fill():
                for _ in range(100):
                    body = calls.random.bytes(8192)
                    begun = calls.begun(session, request_body=body)
                    writer.begin_call(begun)
                    await asyncio.wait_for(writer.end_call(calls.ended(begun, [1], [2])), 10)
                    kept.append((begun.id, body))

            with pytest.raises(StoreUnavailable, match="full"):
                await fill()
            assert kept
            for call_id, body in kept:
                assert reader.request_body(call_id) == body
    finally:
        event.remove(Engine, "connect", limit)
    with Writer(path) as writer, Reader(path) as reader:
        again = await recorded(writer, session, calls)
        assert reader.call(again.id).status is CallStatus.COMPLETE


@pytest.mark.damages_store
async def test_a_file_that_is_moved_away_takes_no_more_calls_and_loses_none(path, tmp_path, calls):
    moved = str(tmp_path / "moved.db")
    with Writer(path) as writer:
        session = calls.session()
        await writer.add(session)
        kept = [await recorded(writer, session, calls) for _ in range(3)]
        os.rename(path, moved)
        with pytest.raises(StoreUnavailable, match=r"moved or replaced.*bridle\.db-wal"):
            await recorded(writer, session, calls)
        writer._renew()
    with pytest.raises(StoreUnavailable, match=r"bridle\.db-wal"):
        migrate(path)
    assert set(os.listdir(tmp_path)) >= {"moved.db", "bridle.db-wal"}
    assert "bridle.db" not in os.listdir(tmp_path), "nothing new is made in its place"
    os.rename(f"{path}-wal", f"{moved}-wal")
    with Reader(moved) as reader:
        assert {call.id for call in reader.calls(session.id)} == {begun.id for begun in kept}
    migrate(path)


@pytest.mark.damages_store
async def test_a_store_that_is_gone_says_so(path, calls):
    with Writer(path, patience=0.2) as writer:
        session = calls.session()
        await writer.add(session)
        with sqlite3.connect(path) as connection:
            connection.execute("DROP TABLE spans")
        with pytest.raises(StoreUnavailable, match="no such table"):
            await recorded(writer, session, calls)


async def test_readers_do_not_wait_for_the_writer(path, calls):
    with Writer(path) as writer, Reader(path) as reader:
        session = calls.session()
        await writer.add(session)
        with Lock(path):
            started = time.monotonic()
            assert reader.session(session.id) == session
            assert time.monotonic() - started < 1


def test_sqlite_is_set_up_as_promised(path):
    engine = connect(path, synchronous="FULL")
    with engine.connect() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    engine.dispose()
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


@pytest.mark.postgres
async def test_a_lost_connection_is_replaced_without_losing_or_doubling_a_call(postgres, calls):
    url = postgres.empty_database()
    migrate(url)
    stop = threading.Event()

    def cut():
        with psycopg.connect(url, autocommit=True) as connection:
            while not stop.wait(0.3):
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )

    with Writer(url) as writer:
        session = calls.session()
        await writer.add(session)
        thread = threading.Thread(target=cut)
        thread.start()
        try:
            prompt = []
            while writer.stats.retries < 4:
                prompt.append(len(prompt))
                await recorded(writer, session, calls, prompt, (7,))
        finally:
            stop.set()
            thread.join()
        assert writer.stats.rejected == 0
    with Reader(url) as reader:
        assert reader.call_counts(session.id) == {CallStatus.COMPLETE: len(prompt)}


@pytest.mark.postgres
async def test_a_server_that_restarts_is_waited_for(postgres, calls):
    url = postgres.empty_database()
    migrate(url)
    with Writer(url) as writer:
        session = calls.session()
        await writer.add(session)
        await recorded(writer, session, calls)
        await asyncio.to_thread(postgres.stop)
        wait = asyncio.ensure_future(recorded(writer, session, calls))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(postgres.start)
        await asyncio.wait_for(wait, 20)
    with Reader(url) as reader:
        assert reader.call_counts(session.id) == {CallStatus.COMPLETE: 2}


@pytest.mark.postgres
async def test_a_commit_that_was_not_confirmed_is_not_written_twice(postgres, calls, monkeypatch):
    url = postgres.empty_database()
    migrate(url)
    with Writer(url) as writer:
        session = calls.session()
        await writer.add(session)
        failures = []

        def lose_the_answer(connection):
            if not failures:
                failures.append(1)
                connection.connection.commit()
                connection.connection.dbapi_connection.close()

        event.listen(writer._engine, "commit", lose_the_answer)
        await recorded(writer, session, calls)
        assert failures
        assert writer.stats.rejected == 0
    with Reader(url) as reader:
        assert reader.call_counts(session.id) == {CallStatus.COMPLETE: 1}


@pytest.mark.postgres
@pytest.mark.parametrize("what", ["reward", "call"])
async def test_a_commit_whose_server_went_down_with_the_answer_is_not_written_twice(
    postgres, calls, what
):
    url = postgres.empty_database()
    migrate(url)
    with Writer(url) as writer:
        session = calls.session()
        await writer.add(session)
        threads = []

        def start_later():
            time.sleep(0.5)
            postgres.start()

        def lose_the_answer(connection):
            if not threads:
                connection.connection.commit()
                connection.connection.dbapi_connection.close()
                postgres.stop()
                threads.append(threading.Thread(target=start_later))
                threads[0].start()

        event.listen(writer._engine, "commit", lose_the_answer)
        try:
            if what == "reward":
                await writer.add(Reward(session.id, "tests", 1.0, created_at=1.0))
            else:
                await recorded(writer, session, calls)
        finally:
            await asyncio.to_thread(threads[0].join)
        assert writer.stats.retries
        assert writer.stats.rejected == 0
        await recorded(writer, session, calls)
    with Reader(url) as reader:
        assert len(reader.rewards(session.id)) == (what == "reward")
        assert reader.call_counts(session.id) == {CallStatus.COMPLETE: 1 + (what == "call")}


@pytest.mark.postgres
async def test_a_server_that_may_only_be_read_is_waited_for(postgres, calls):
    """The server stands for one that a failover has not reached yet."""
    url = postgres.empty_database()
    migrate(url)

    def read_only(setting):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute(
                f"ALTER DATABASE postgres SET default_transaction_read_only = {setting}"
            )
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    with Writer(url) as writer:
        session = calls.session()
        await writer.add(session)
        await asyncio.to_thread(read_only, "on")
        try:
            wait = asyncio.ensure_future(recorded(writer, session, calls))
            await asyncio.sleep(0.3)
            assert not wait.done()
        finally:
            await asyncio.to_thread(read_only, "off")
        await asyncio.wait_for(wait, 20)
        assert writer.stats.rejected == 0
    with Reader(url) as reader:
        assert reader.call_counts(session.id) == {CallStatus.COMPLETE: 1}
