"""A backup is taken under load, everything is destroyed, and the backup is restored.

All that was acknowledged before the backup is there, the audit is clean, and every session goes on.
"""

from __future__ import annotations

import json
import runpy
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus
from support.processes import bridle, until

pytestmark = [pytest.mark.loop, pytest.mark.timeout(300)]

KILL = runpy.run_path(str(Path(__file__).parents[1] / "proxy/test_kill.py"))
CLIENTS = 6


def printed(*arguments: str) -> str:
    done = bridle(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def destroy(url: str, request: pytest.FixtureRequest) -> None:
    if url.startswith("postgresql"):
        request.getfixturevalue("postgres").empty_database()
        return
    for file in Path(url).parent.iterdir():
        file.unlink()


def test_a_backup_under_load_is_restored_and_every_session_goes_on(
    url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, backup = tmp_path / "model", tmp_path / "backups" / "bridle.db"
    train_tokenizer(model, ["The answer is four. Question 0123456789?"] * 20)

    def play(_: Any) -> ScriptedReply:
        return ScriptedReply(KILL["ANSWER"], delay=0.002)

    with ScriptedEngine(model, play, served_model_name="policy") as engine:
        proxy = KILL["Process"](engine.base_url, url)
        proxy.start()
        try:
            clients = [KILL["Client"](proxy.url, number) for number in range(CLIENTS)]
            saved = [call for calls in saved_under_load(clients, url, backup) for call in calls]
            assert saved
            proxy.kill()
            destroy(url, request)

            printed("import-db", str(backup), "--store", url)
            proxy.start()
            with Reader(url) as reader:
                before = {session.id for session in reader.sessions()}
                assert len(before) == CLIENTS
                for call_id in saved:
                    row = reader.call(call_id)
                    assert row.status is CallStatus.COMPLETE
                    KILL["assert_whole"](reader, row)
            with httpx.Client(base_url=proxy.url, timeout=30) as asking:
                for client in clients:
                    assert client.say(asking).status_code == 200
        finally:
            proxy.kill()
    audit = json.loads(printed("audit", "--store", url, "--json"))
    assert audit["sessions"] == CLIENTS
    with Reader(url) as reader:
        assert {session.id for session in reader.sessions()} == before
        for client in clients:
            assert reader.call(client.acknowledged[-1]).status is CallStatus.COMPLETE


def saved_under_load(clients: list[Any], url: str, backup: Path) -> list[list[str]]:
    """Backs the store up while all talk; what each had been acknowledged before that began."""
    stop = threading.Event()
    threads = [threading.Thread(target=client.talk, args=(stop,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        wait_for(clients, 3)
        before = [list(client.acknowledged) for client in clients]
        printed("backup", str(backup), "--store", url)
        wait_for(clients, max(map(len, before)) + 1)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return before


def wait_for(clients: list[Any], calls: int) -> None:
    until(lambda: all(len(client.acknowledged) >= calls for client in clients), 120)
