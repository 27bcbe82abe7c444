"""A store that changes rewards inside real training: the step fails by name."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from bridle.store.reading.queries import Reader
from bridle.store.schema.database import migrate
from support.processes import bridle

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("warm_start")]

TAMPERING = """
CREATE TRIGGER tampering AFTER INSERT ON rewards BEGIN
    UPDATE rewards SET value = 100 WHERE rowid = NEW.rowid;
END
"""


def test_a_store_that_changes_rewards_ends_the_step_by_name_also_when_resumed(
    training_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    arguments = training_arguments()
    store = tmp_path / "out/bridle.db"
    migrate(str(store))
    with sqlite3.connect(store) as connection:
        connection.executescript(TAMPERING)
    for _ in range(2):
        done = bridle(*arguments, "--steps", "1")
        assert done.returncode == 1, done.stdout + done.stderr
        assert "the store has the run's rewards reward=100" in done.stderr
        assert "Traceback" not in done.stderr
    with Reader(str(store)) as reader:
        (run,) = reader.runs("train")
        assert not list(reader.metrics(run.id, "reward/mean")), "no step was taken"
