"""The agent plays for its reward: no attempt changes one, reaches a neighbour or ends the run.

The default suite has two cells of the matrix, ``make test-loop`` and ``make test-containers`` have
samples, and ``make test-attacks`` has the others. ``test_controls.py`` shows that each attempt can
succeed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from security.stage.play import Cell, every_user, python_for
from security.stage.verdict import judge

from bridle.harnesses.sandboxes.container.engine import Engine
from bridle.harnesses.sandboxes.walls import missing
from bridle.reconstruct.exports.formats import export
from bridle.reconstruct.exports.selection import Selection
from bridle.store.reading.queries import Reader
from bridle.store.reward import Reward, RewardSource
from bridle.store.writing.writer import Writer

WALLS = pytest.mark.skipif(missing() is not None, reason=f"no namespaces: {missing()}")


def play(cell: Cell, also: Callable[[Cell], object] = lambda _: None) -> None:
    """Play a cell and judge it. Skip it where the machine does not permit it."""
    if cell.user == "root" and os.getuid() != 0:
        pytest.skip("this is not root")
    if cell.user == "ordinary" and not python_for(cell.prefix()):
        pytest.skip("no interpreter of this version that every user may start")
    if cell.user == "ordinary" and cell.sandbox in ("process", "forked"):
        walls = [*cell.prefix(), "bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"]
        if subprocess.run(walls, capture_output=True, check=False).returncode != 0:
            pytest.skip("this machine gives no namespaces to an ordinary user")
    with cell.played():
        judge(cell)
        also(cell)


@WALLS
@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize("sandbox", ["process", "forked"])
@pytest.mark.sampled(2)
def test_no_attempt_from_inside_a_rollout_succeeds(
    attack_policy: Path, attack_engine: str, sandbox: str
) -> None:
    user = "root" if os.getuid() == 0 else "ordinary"
    play(Cell(sandbox, "rollout", user, attack_policy, attack_engine))


SAMPLE = {
    ("process", "rollout", "ordinary"),
    ("forked", "train", "root"),
    ("users", "rollout", "root"),
}
"""The cells that run with the other loops; `make test-attacks` runs all others."""


def cells() -> list[Any]:
    every = itertools.product(
        ("process", "forked", "users"), ("rollout", "train"), ("root", "ordinary")
    )
    marks = {True: pytest.mark.loop, False: pytest.mark.attacks}
    return [pytest.param(*cell, marks=marks[cell in SAMPLE]) for cell in every]


@WALLS
@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize(("sandbox", "entry", "user"), cells())
@pytest.mark.sampled(2)
def test_no_attempt_succeeds(
    attack_policy: Path, attack_engine: str, sandbox: str, entry: str, user: str
) -> None:
    if sandbox == "users" and (os.getuid() != 0 or shutil.which("setpriv") is None):
        pytest.skip("changes users, as root")
    if sandbox == "users" and not python_for(every_user()):
        pytest.skip("no interpreter of this version that every user may start")
    play(Cell(sandbox, entry, user, attack_policy, attack_engine))


@WALLS
@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize(
    "sandbox",
    [
        pytest.param("process", marks=pytest.mark.attacks),
        pytest.param("forked", marks=pytest.mark.loop),
    ],
)
def test_no_attempt_succeeds_in_a_training_that_starts_engine_and_proxy(
    attack_policy: Path, sandbox: str
) -> None:
    user = "root" if os.getuid() == 0 else "ordinary"
    play(Cell(sandbox, "stack", user, attack_policy), an_export_reads_what_training_reads)


def an_export_reads_what_training_reads(cell: Cell) -> None:
    store = str(cell.world.store)
    with Reader(store) as reader:
        (run,) = reader.runs("train")
        session = next(iter(reader.sessions(run=run.id)))
    bonus = Reward(session.id, "bonus", 100.0, time.time(), source=RewardSource.OPERATOR)
    with Writer(store) as writer:
        writer.add_sync(bonus)
    with Reader(store) as reader:
        table = cell.world.folder / "tokens.parquet"
        report = export(reader, table, "tokens", Selection(run=run.id), "tree")
    assert report.rewards.keys() == {"reward"}


@pytest.mark.parametrize(
    ("entry", "user"),
    [
        pytest.param("rollout", "root", marks=pytest.mark.containers),
        pytest.param("rollout", "ordinary", marks=pytest.mark.attacks),
        pytest.param("train", "root", marks=pytest.mark.attacks),
        pytest.param("train", "ordinary", marks=pytest.mark.attacks),
    ],
)
@pytest.mark.usefixtures("warm_start")
def test_no_attempt_from_inside_a_container_succeeds(
    attack_policy: Path, attack_engine: str, entry: str, user: str
) -> None:
    play(Cell("container", entry, user, attack_policy, attack_engine))
    assert asyncio.run(Engine("docker").sweep()) == [], "containers outlived their run"
