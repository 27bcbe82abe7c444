"""Commands that compute set their threads, before PyTorch is imported, unless the user has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridle.cli import program
from bridle.threads import COMPUTES, set_thread_defaults, usable_cores

NAMES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM")


def machine(folder: Path, cores: int, hardware_threads: int = 2) -> Path:
    """The folder of a machine's processors, as Linux lists them."""
    for core in range(cores):
        siblings = [core + each * cores for each in range(hardware_threads)]
        for cpu in siblings:
            topology = folder / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            listed = ",".join(map(str, siblings))
            (topology / "thread_siblings_list").write_text(f"{listed}\n")
    return folder


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("300000 100000", 3), ("50000 100000", 1), ("900000 100000", 8), ("", 8)],
)
def test_usable_cores_are_the_physical_ones_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    file = tmp_path / "cpu.max"
    file.write_text(quota)
    assert usable_cores(machine(tmp_path / "cpus", 8), file) == cores
    assert usable_cores(tmp_path / "unknown", tmp_path / "none") == 16


def test_cores_that_the_process_may_not_use_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 8})  # 0 and 8 are one core
    assert usable_cores(machine(tmp_path / "cpus", 8), tmp_path / "none") == 2


@pytest.mark.parametrize(
    ("command", "threads"), [("sft", "8"), ("train", "4"), ("demo", "4"), ("engine", None)]
)
def test_a_command_that_starts_others_leaves_them_half_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, command: str, threads: str | None
) -> None:
    monkeypatch.setattr("bridle.threads.usable_cores", lambda: 8)
    environment: dict[str, str] = {}
    set_thread_defaults(command, environment)
    assert environment.get("OMP_NUM_THREADS") == threads
    assert environment["OMP_WAIT_POLICY"] == "passive"
    users = dict.fromkeys(NAMES, "3")
    set_thread_defaults(command, users)
    assert users == dict.fromkeys(NAMES, "3")
    recording: dict[str, str] = {}
    set_thread_defaults("proxy", recording)
    assert recording == {}


def test_every_command_that_computes_is_a_command() -> None:
    assert set(COMPUTES) <= set(program.COMMANDS)


@pytest.mark.parametrize("command", ["train", "sft", "demo", "reproduce", "eval"])
def test_they_are_set_before_a_command_is_loaded(command: str) -> None:
    script = (
        "import json, os, sys\n"
        "import bridle.cli.program as program\n"
        "def seen(name):\n"
        "    print(json.dumps([os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules]))\n"
        "    sys.exit()\n"
        "program.loaded = seen\n"
        "program.app()\n"
    )
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", script, command],
        capture_output=True,
        text=True,
        check=True,
        env=clean,
    )
    assert json.loads(done.stdout) == ["passive", False]
