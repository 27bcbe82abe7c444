"""A store of either kind, and calls to put into it."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psycopg
import pytest

from store.database import migrate
from store.queries import Reader
from store.records import (
    CallBegun,
    CallEnded,
    CallStatus,
    Choice,
    SessionRecord,
    VersionRun,
    new_id,
)
from store.writer import Writer


class Calls:
    """Makes the records of calls that are complete and agree with themselves."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def session(self, **fields) -> SessionRecord:
        return SessionRecord(**{"id": new_id("session"), "created_at": time.time(), **fields})

    def begun(self, session: SessionRecord | str, **fields) -> CallBegun:
        values = {
            "id": new_id("call"),
            "session_id": session if isinstance(session, str) else session.id,
            "dialect": "chat",
            "started_at": time.time(),
            "request_body": b'{"model":"policy","messages":[]}',
            "stream": True,
            "model_requested": "policy",
        }
        return CallBegun(**values | fields)

    def choice(self, ids, version: int = 1, finish_reason: str = "stop") -> Choice:
        return Choice(
            token_ids=np.asarray(ids, dtype=np.uint32),
            logprobs=-self.random.random(len(ids)).astype(np.float32),
            versions=(VersionRun(0, version),) if len(ids) else (),
            finish_reason=finish_reason,
        )

    def ended(self, begun: CallBegun, prompt, *sampled, version: int = 1, **fields) -> CallEnded:
        choices = tuple(self.choice(ids, version) for ids in sampled)
        values = {
            "id": begun.id,
            "session_id": begun.session_id,
            "status": CallStatus.COMPLETE,
            "ended_at": time.time(),
            "prompt_token_ids": np.asarray(prompt, dtype=np.uint32),
            "choices": choices,
            "response_body": f"data: {begun.id}\n\n".encode(),
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": sum(len(choice.token_ids) for choice in choices),
            },
            "message": {"role": "assistant", "content": "yes"},
        }
        return CallEnded(**values | fields)


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request, tmp_path):
    """An empty, migrated store."""
    if request.param == "sqlite":
        address = str(tmp_path / "store" / "bridle.db")
    else:
        address = request.getfixturevalue("postgres").empty_database()
    migrate(address)
    return address


@pytest.fixture
def writer(url):
    with Writer(url) as opened:
        yield opened


@pytest.fixture
def reader(url):
    with Reader(url) as opened:
        yield opened


@pytest.fixture
def held(url):
    """``with held():`` no transaction goes on: another connection has the write lock.

    A record put in meanwhile starts a transaction that waits; those after it gather.
    """

    @contextmanager
    def hold():
        if url.startswith("postgresql"):
            with psycopg.connect(url) as connection:
                connection.execute("LOCK TABLE writers IN ACCESS EXCLUSIVE MODE")
                yield
                connection.rollback()
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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

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
def postgres():
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
    return found[-1].parent if found else Path(on_path).parent
