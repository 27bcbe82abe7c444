"""``kill -9`` of trainer, engine or proxy in the midst of a step: the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bridle.run.groups import FINISHED
from bridle.store.reading.queries import Reader
from bridle.trainer.learner.checkpoint import STATE_FILE, checkpoints

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("warm_start")]

GROUPS, SIZE = 2, 6
SLOW = "import random, time\ntime.sleep(random.uniform(0, 1.5))\n"


def finished(store: Path) -> Counter[str]:
    """Count the sessions of each group that ended with a verdict."""
    with Reader(str(store)) as reader:
        found = [one for one in reader.sessions(sealed=True) if one.outcome in FINISHED]
    return Counter(str(session.group_id) for session in found)


def service_pid(name: str, out: Path) -> int:
    """The engine or the proxy that the command on ``out`` has started."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            argv = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if name in argv and any(argument.startswith(str(out.parent)) for argument in argv):
            return int(process.name)
    raise AssertionError(f"no {name} runs")


@pytest.mark.parametrize("killed", ["trainer", "engine", "proxy"])
@pytest.mark.sampled(2)
def test_no_finished_session_is_run_again_and_none_is_trained_twice(
    training_arguments: Callable[..., list[str]], tmp_path: Path, killed: str
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bridle", *training_arguments(SLOW), "--steps", "3"]
    store = out / "bridle.db"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as first:
        deadline = time.monotonic() + 200
        while not (out / "sessions").exists() or finished(store).total() < GROUPS * SIZE + 4:
            assert first.poll() is None, first.stderr and first.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if killed == "trainer":
            first.kill()
        else:
            os.kill(service_pid(killed, out), signal.SIGKILL)
        first.wait(120)
    before = finished(store)
    assert first.returncode != 0
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    after = finished(store)
    assert {group: after[group] for group in before} == {group: SIZE for group in before}, (
        "what was finished counts, and only what was missing has been run"
    )
    assert set(after.values()) == {SIZE}
    assert len(after) == 3 * GROUPS
    (*_, newest) = checkpoints(out / "checkpoints")
    state = torch.load(newest / STATE_FILE, weights_only=True)
    assert state["step"] == 3
    assert state["groups"] == {"first": 3 * GROUPS, "taken": []}, "each was trained in one step"
    with Reader(str(store)) as reader:
        (run,) = reader.runs("train")
        collected = {m.step: m.value for m in reader.metrics(run.id, "sessions/collected")}
    assert sum(collected.values()) >= 3 * GROUPS * SIZE
