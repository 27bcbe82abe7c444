"""Each attempt succeeds where nothing keeps it from that, so a broken attempt defends nothing.

It runs in a plain process of the operator's user, with the admin key as its key. Where its target
would be this machine's own (the kernel's settings, every process), it has one that stands for that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from security.attempts import ATTEMPTS
from security.attempts.declaration import reached
from security.attempts.verifier_inputs import LEFT
from security.stage.bench import Bench, prepared


@pytest.fixture(scope="module")
def stage(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with prepared(model_dir, tmp_path_factory.mktemp("controls") / "bridle.db") as bench:
        yield bench


@pytest.fixture
def bench(stage: Bench, request: pytest.FixtureRequest) -> Bench:
    stage.renew(request.node.callspec.params["name"])
    return stage


def until(condition: Callable[[], Any]) -> bool:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def secret(bench: Bench, name: str) -> bool:
    return reached(bench.ask(name)[name])


def reward(bench: Bench, name: str) -> bool:
    bench.ask(name)
    return any(one.value == 100 for one in bench.lab.reader.rewards(bench.session["id"]))


def sealed(bench: Bench, name: str) -> bool:
    bench.ask(name)
    return bench.lab.reader.session(bench.session["id"]).sealed_at is not None


def neighbour(bench: Bench, name: str) -> bool:
    reader, other = bench.lab.reader, bench.world.neighbour["session"]

    def record() -> tuple[Any, ...]:
        return reader.session(other), reader.rewards(other), reader.call_ids(other)

    before, recorded = bench.world.state(), record()
    bench.ask(name)
    if name.startswith("kill"):
        return until(lambda: not bench.world.alive())
    return bool(bench.world.changes(before)) or record() != recorded


def changed(bench: Bench, name: str) -> bool:
    before = bench.world.state()
    bench.ask(name)
    for path in (bench.away / "logs").iterdir():
        path.write_text("a log")
    if name == "leave_modules":
        subprocess.run([sys.executable, "-c", "import json"], cwd=bench.workspace, check=False)
    found = bench.world.changes(before)
    bench.restore_the_store()
    return bool(found)


def verifier(bench: Bench, name: str) -> bool:
    bench.ask(name)
    return any((bench.workspace / left).exists() for left in LEFT)


NAIVE = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"
USER = ("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")


def remains(bench: Bench, name: str) -> bool:
    """Root removes closed folders too, so that another user removes them."""
    bench.ask(name)
    root = os.getuid() == 0
    if root:
        subprocess.run(["chown", "-R", "12345", bench.workspace.parent], check=True)
    command = [*(USER if root else ()), "python3", "-c", NAIVE, bench.workspace]
    subprocess.run(command, cwd="/", capture_output=True, check=False)
    return bool(bench.left()) or bench.workspace.exists()


def inherited(bench: Bench, name: str) -> bool:
    if name == "change_loaded_modules":
        return bench.world.token in str(bench.ask(name, look=True)["inherited"])
    assert not bench.ask(look=True)["inherited"]
    bench.ask(name)
    left = bench.ask(look=True)["inherited"]
    return set(left) == {name} and bench.world.token in left[name]


def run(bench: Bench, name: str) -> bool:
    if name == "take_memory_without_end":
        number = bench.ask(name, wait=False)["pid"]
        status = Path(f"/proc/{number}/statm")
        return until(lambda: int(status.read_text().split()[1]) * 4096 > 30 << 20)
    bench.ask(name)

    def heard() -> bool:
        bench.relay.settimeout(10)
        with bench.relay.accept()[0] as connection:
            return connection.recv(64).startswith(b"control")

    signs: dict[str, Callable[[], bool]] = {
        "speak_as_the_first_process": heard,
        "write_to_inherited_descriptors": lambda: b"evil" in os.read(bench.pipe, 4096),
        "start_processes_without_end": lambda: len(bench.left()) > 3,
        "leave_a_huge_file": lambda: (bench.workspace / "huge").stat().st_size == 1 << 40,
    }
    killed = bench.standin
    assert killed is not None
    return signs.get(name, lambda: until(lambda: killed.poll() is not None))()


SIGNS = (secret, reward, sealed, neighbour, changed, verifier, remains, inherited, run)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_succeeds_where_nothing_keeps_it_from_that(bench: Bench, name: str) -> None:
    if name == "read_the_disk" and os.getuid() != 0:
        pytest.skip("root alone makes devices")
    sign = {one.__name__: one for one in SIGNS}[ATTEMPTS[name].sign]
    assert sign(bench, name), ATTEMPTS[name].tries
