"""The connections of a process to PostgreSQL: few, shared, and waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest
from sqlalchemy.exc import ProgrammingError
from tests.store.conftest import Postgres

from bridle.store.errors import StoreUnavailable
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord, new_id
from bridle.store.schema import connections
from bridle.store.schema.database import connect, migrate
from bridle.store.writing.writer import Writer
from support.processes import until

pytestmark = pytest.mark.postgres


@pytest.fixture
def url(postgres: Postgres) -> str:
    address = postgres.empty_database()
    migrate(address)
    return address


@pytest.fixture
def count(url: str) -> Iterator[Callable[[], int]]:
    """The number of this process's connections."""
    with psycopg.connect(url, autocommit=True) as server:

        def connections() -> int:
            row = server.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'bridle %'"
            ).fetchone()
            assert row is not None
            return int(row[0])

        yield connections


def session() -> SessionRecord:
    return SessionRecord(id=new_id("ses"), created_at=time.time())


def test_writers_and_readers_of_a_process_share_two_connections(
    url: str, count: Callable[[], int]
) -> None:
    with ExitStack() as stack:
        writers = [stack.enter_context(Writer(url)) for _ in range(3)]
        readers = [stack.enter_context(Reader(url)) for _ in range(3)]
        with ThreadPoolExecutor(24) as pool:
            for _ in range(50):
                pool.submit(writers[0].add_sync, session())
                pool.submit(writers[1].add_sync, session())
                pool.submit(lambda: [list(one.sessions()) for one in readers])
        assert len(list(readers[0].sessions())) == 100
        assert count() == 2


def test_the_urls_parameter_lets_a_process_open_more(url: str, count: Callable[[], int]) -> None:
    asleep = threading.Barrier(4)

    def hold(reader: Reader) -> None:
        with reader.engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")
            asleep.wait(30)
            asleep.wait(30)

    with Reader(f"{url}?connections=4&application_name=bridle+more") as reader:
        threads = [threading.Thread(target=hold, args=(reader,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        asleep.wait(30)
        assert count() == 3, "the fourth is the writers'"
        asleep.wait(30)
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("number", ["1", "0", "two", "-3"])
def test_fewer_than_two_connections_are_refused(number: str) -> None:
    with pytest.raises(StoreUnavailable, match="connections in the store's URL is a number from 2"):
        connect(f"postgresql://localhost/x?connections={number}")


def test_a_thread_that_reads_inside_a_read_does_not_wait_for_itself(url: str) -> None:
    with Writer(url) as writer, Reader(url) as reader:
        writer.add_sync(session())
        with reader.engine.connect() as outer:
            outer.exec_driver_sql("SELECT 1")
            assert len(list(reader.sessions())) == 1


def test_a_store_that_is_closed_leaves_the_others_their_connections(
    url: str, count: Callable[[], int]
) -> None:
    with Reader(url) as reader, reader.engine.connect() as connection:
        connection.exec_driver_sql("SELECT 1")
        Reader(url).close()
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    until(lambda: not count(), failure=lambda: "the server keeps a connection")


def test_a_thread_waits_for_a_connection_and_then_is_told_the_setting(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(2) as others, Reader(url) as reader:
        with reader.engine.connect():
            waits = others.submit(lambda: list(reader.sessions()))
            with pytest.raises(TimeoutError):
                waits.result(0.3)
            monkeypatch.setattr(connections, "_WAIT_S", 0.1)
            late = others.submit(lambda: list(reader.sessions()))
            with pytest.raises(StoreUnavailable, match="connections=N in the store's URL"):
                late.result(30)
        assert waits.result(30) == []


@pytest.fixture
def limited(postgres: Postgres, url: str) -> Iterator[str]:
    """The store's URL for a role that may have two connections."""
    with psycopg.connect(url, autocommit=True) as server:
        server.execute("CREATE ROLE few LOGIN CONNECTION LIMIT 2")
        server.execute("GRANT pg_read_all_data TO few")
    yield url.replace("bridle@", "few@")
    with psycopg.connect(url, autocommit=True) as server:
        server.execute("DROP OWNED BY few")
        server.execute("DROP ROLE few")


def test_a_server_without_a_free_connection_is_waited_for(limited: str) -> None:
    with ExitStack() as stack:
        others = [stack.enter_context(psycopg.connect(limited)) for _ in range(2)]
        reader = stack.enter_context(Reader(limited))
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(lambda: list(reader.sessions()))
            with pytest.raises(TimeoutError):
                waits.result(0.5)
            others[0].close()
            assert waits.result(30) == []


def test_a_server_that_stays_full_is_reported_with_what_to_do(
    limited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_REFUSED_S", 0.2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(psycopg.connect(limited))
        reader = stack.enter_context(Reader(limited))
        with pytest.raises(StoreUnavailable, match=r"start fewer processes, or raise max_conn"):
            list(reader.sessions())


def test_a_connection_that_the_server_closed_is_replaced_before_it_is_used(
    url: str, count: Callable[[], int]
) -> None:
    with Reader(url) as reader:
        assert list(reader.sessions()) == []
        with psycopg.connect(url, autocommit=True) as server:
            server.execute(
                "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity"
                " WHERE application_name LIKE 'bridle %'"
            )
        assert list(reader.sessions()) == []


def test_errors_of_one_store_are_not_another_readers(url: str) -> None:
    engine = connect(url)
    with Reader(url), engine.connect() as connection, pytest.raises(ProgrammingError):
        connection.exec_driver_sql("SELECT nonsense")
