"""A store in trouble while clients talk through a real proxy: locked, full, its server killed.

No call that was acknowledged is lost, no call waits longer than its patience, and every client goes
on when the trouble is over.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.proxy.settings import Limits
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus
from support.processes import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

KILL = runpy.run_path(str(Path(__file__).parents[1] / "proxy/test_kill.py"))
PATIENCE_S = Limits().store_patience_s
OWN_S = 5.0
"""The seconds that a call takes without any trouble, on a machine that is busy."""
CLIENTS = 8


class Talker:
    """A client that says one thing after the other, and how long each took."""

    def __init__(self, url: str, number: int) -> None:
        self.client = KILL["Client"](url, number)
        self.refused = 0
        self.longest_s = 0.0

    @property
    def acknowledged(self) -> list[str]:
        found: list[str] = self.client.acknowledged
        return found

    def talk(self, url: str, stop: threading.Event) -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE_S + 60) as http:
            while not stop.is_set():
                since = time.monotonic()
                answered = self.client.say(http)
                self.longest_s = max(self.longest_s, time.monotonic() - since)
                if answered.status_code == 503 or "store" in answered.text:
                    self.refused += 1
                    time.sleep(0.2)


@contextlib.contextmanager
def proxied(folder: Path, store: str) -> Iterator[Any]:
    model = folder / "model"
    train_tokenizer(model, ["The answer is four. Question 0123456789?"] * 20)

    def play(_: Any) -> ScriptedReply:
        return ScriptedReply(KILL["ANSWER"], delay=0.002)

    with ScriptedEngine(model, play, served_model_name="policy") as engine:
        process = KILL["Process"](engine.base_url, store)
        process.start()
        try:
            yield process
        finally:
            process.kill()


def troubled(proxy: Any, store: str, trouble: Callable[[], None]) -> list[Talker]:
    """All talk before, during and after ``trouble``; then the store has what was acknowledged."""
    talkers = [Talker(proxy.url, number) for number in range(CLIENTS)]
    stop = threading.Event()
    threads = [threading.Thread(target=one.talk, args=(proxy.url, stop)) for one in talkers]

    def goes_on() -> None:
        before = [len(one.acknowledged) for one in talkers]
        until(
            lambda: all(
                len(one.acknowledged) >= n + 3 for one, n in zip(talkers, before, strict=True)
            ),
            PATIENCE_S + 30,
        )

    for thread in threads:
        thread.start()
    try:
        goes_on()
        trouble()
        goes_on()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    longest = max(one.longest_s for one in talkers)
    acknowledged = [call for one in talkers for call in one.acknowledged]
    refused = sum(one.refused for one in talkers)
    with Reader(store) as reader:
        for call_id in acknowledged:
            row = reader.call(call_id)
            assert row.status is CallStatus.COMPLETE
            KILL["assert_whole"](reader, row)
    print(f"{len(acknowledged)} acknowledged, 0 lost, {refused} refused, longest {longest:.1f} s")
    assert longest <= PATIENCE_S + OWN_S
    return talkers


def test_a_store_that_is_locked_for_longer_than_any_patience(tmp_path: Path) -> None:
    store = str(tmp_path / "bridle.db")

    def lock() -> None:
        with contextlib.closing(sqlite3.connect(store, isolation_level=None, timeout=30)) as other:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(70)
            other.rollback()

    with proxied(tmp_path, store) as proxy:
        talkers = troubled(proxy, store, lock)
    assert all(one.refused for one in talkers), "each had to give up meanwhile"


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small file system, which root may")
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", disk], check=True)
    try:
        store = str(disk / "bridle.db")

        def fill() -> None:
            ballast = disk / "ballast"
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * 4096)
            time.sleep(5)
            ballast.unlink()

        with proxied(tmp_path, store) as proxy:
            talkers = troubled(proxy, store, fill)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert any(one.refused for one in talkers)


@pytest.mark.postgres
def test_a_server_that_is_killed_twice(tmp_path: Path, postgres: Any) -> None:
    store = str(postgres.empty_database())

    def kill_twice() -> None:
        for _ in range(2):
            leader = int((postgres.folder / "data/postmaster.pid").read_text().split()[0])
            children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
            for pid in (leader, *map(int, children)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while any(Path(f"/proc/{pid}").exists() for pid in children):
                time.sleep(0.05)
            time.sleep(2)
            postgres.start()
            time.sleep(3)

    with proxied(tmp_path, store) as proxy:
        troubled(proxy, store, kill_twice)
