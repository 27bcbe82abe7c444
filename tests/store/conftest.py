"""A store of either kind."""

from __future__ import annotations

import os
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.support.processes import free_port

from bridle.store.schema.database import migrate


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty, migrated store."""
    if request.param == "sqlite":
        address = str(tmp_path / "store" / "bridle.db")
    else:
        address = str(request.getfixturevalue("postgres").empty_database())
    migrate(address)
    return address


@pytest.fixture
def held(url: str) -> Callable[[], AbstractContextManager[None]]:
    """``with held():`` no transaction goes on: another connection has the write lock.

    A record put in meanwhile starts a transaction that waits; those after it gather.
    """

    @contextmanager
    def hold() -> Iterator[None]:
        if url.startswith("postgresql"):
            with psycopg.connect(url) as server:
                server.execute("LOCK TABLE writers IN ACCESS EXCLUSIVE MODE")
                yield
                server.rollback()
        else:
            connection = sqlite3.connect(url, isolation_level=None)
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.rollback()
            connection.close()

    return hold


class Postgres:
    """A server of our own in a temporary folder, on loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.binaries = _binaries()
        self.user = pwd.getpwnam("postgres") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
        os.chown(folder, self.user.pw_uid, self.user.pw_gid)
        self._run("initdb", "-D", f"{folder}/data", "-A", "trust", "-U", "bridle", "--no-sync")
        self.port = free_port()

    def start(self) -> None:
        # The machine does not lose power in these tests.
        options = f"-c listen_addresses=127.0.0.1 -c fsync=off -p {self.port} -k {self.folder}"
        log = f"{self.folder}/log"
        self._run("pg_ctl", "-D", f"{self.folder}/data", "-w", "-l", log, "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-D", f"{self.folder}/data", "-w", "-m", mode, "stop")

    def empty_database(self) -> str:
        """The server's one database, emptied: making one takes a second, emptying it does not."""
        url = f"postgresql://bridle@127.0.0.1:{self.port}/postgres"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        return url

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self.binaries / program, *arguments],
            check=True,
            user=self.user.pw_uid,
            group=self.user.pw_gid,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
        )


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="bridle-postgres-"))
    server = Postgres(folder)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)


def _binaries() -> Path:
    """Debian keeps them off the path; the newest server counts."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        raise RuntimeError("PostgreSQL is not installed: apt-get install postgresql")
    return (found[-1] if on_path is None or found else Path(on_path)).parent
