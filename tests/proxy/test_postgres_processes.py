"""Several proxies on one PostgreSQL: the connections of each process, and its transactions.

``pytest -m postgres -s tests/proxy/test_postgres_processes.py`` prints the figures.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import psycopg
import pytest
from tests.store.conftest import Postgres
from tests.store.conftest import postgres as postgres

pytestmark = [pytest.mark.postgres]

KEY = "the-operators-key"
ADMIN = {"authorization": f"Bearer {KEY}"}
WORKERS = (1, 1, 2, 2)
"""The worker processes of each proxy."""
PROCESSES = sum(WORKERS)
PARALLEL = 64
COUNTED_S = 90
"""Seconds after which PostgreSQL has counted the calls' transactions (idle connections, late)."""
CALLS = 200
"""Number of calls to each proxy."""


class Server:
    """Looks at a PostgreSQL on a connection that is not counted."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self.set_autovacuum("off")

    def connections(self) -> int:
        """Return the number of connections of others."""
        query = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        row = self._connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])

    def transactions(self) -> int:
        """Return the number of transactions so far. An idle connection counts its own late."""
        query = (
            "SELECT xact_commit + xact_rollback FROM pg_stat_database"
            " WHERE datname = current_database()"
        )
        row = self._connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])

    def rate(self, seconds: float) -> float:
        """Return the transactions per second over a while, without those of this connection."""
        began, first = time.monotonic(), self.transactions()
        time.sleep(seconds)
        last = self.transactions()
        return (last - first - 1) / (time.monotonic() - began)

    def set_autovacuum(self, value: str) -> None:
        """Set whether the server cleans up, whose transactions are counted too."""
        self._connection.execute(f"ALTER SYSTEM SET autovacuum = {value}")
        self._connection.execute("SELECT pg_reload_conf()")

    def close(self) -> None:
        self.set_autovacuum("DEFAULT")
        self._connection.close()


@contextmanager
def proxy(engine: str, store: str, workers: int) -> Iterator[str]:
    """Start a proxy of so many processes, and yield its base URL."""
    command = [sys.executable, "-m", "bridle", "proxy", "--engine", engine, "--store", store]
    command += ["--port", "0", "--json", "--workers", str(workers)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "BRIDLE_ADMIN_KEY": KEY}
    )
    try:
        assert process.stdout is not None
        url = str(json.loads(process.stdout.readline())["url"])
        yield url
    finally:
        process.terminate()
        process.wait(30)


def test_four_proxies_keep_two_connections_a_process_and_rest_when_idle(
    stage: Any, ask: Any, until: Any, postgres: Postgres
) -> None:
    store = postgres.empty_database()
    with ExitStack() as stack:
        server = Server(store)
        stack.callback(server.close)
        urls = [stack.enter_context(proxy(stage.engine.base_url, store, n)) for n in WORKERS]
        client = httpx.Client(timeout=120, trust_env=False, headers=ADMIN)
        stack.callback(client.close)
        until(lambda: all(client.get(f"{url}/healthz").status_code == 200 for url in urls))

        def call(number: int) -> int:
            url = urls[number % len(urls)]
            return client.post(f"{url}/s/load-{number}/v1/chat/completions", json=ask).status_code

        most, over = [0], threading.Event()

        def watch() -> None:
            while not over.wait(0.05):
                most.append(server.connections())

        watching = threading.Thread(target=watch)
        watching.start()
        with ThreadPoolExecutor(PARALLEL) as pool:
            replies = list(pool.map(call, range(CALLS * len(urls))))
        over.set()
        watching.join()
        failed = len(replies) - replies.count(200)
        rate, deadline = math.inf, time.monotonic() + COUNTED_S
        while rate > PROCESSES and time.monotonic() < deadline:
            rate = server.rate(10)
        idle = server.connections()
        print(
            f"\n{PROCESSES} processes: {max(most)} connections under {PARALLEL} parallel calls"
            f" ({failed} of {len(replies)} failed), {idle} idle;"
            f" {rate / PROCESSES:.2f} transactions a second a process"
        )
    assert failed == 0
    assert max(most) <= 2 * PROCESSES
    assert rate <= PROCESSES
