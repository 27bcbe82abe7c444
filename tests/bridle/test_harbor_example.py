"""The Harbor task of the examples, as far as it needs no container."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from bridle.harnesses.tasks import tasks_from
from bridle.run.examples import example_directory

FOLDER = example_directory("harbor_task")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A folder in place of the container's ``/app``."""
    folder = tmp_path / "app"
    folder.mkdir()
    shutil.copy(FOLDER / "environment/sales.csv", folder)
    return folder


def accepted(app: Path) -> bool:
    checked = [sys.executable, str(FOLDER / "tests/check.py"), str(app)]
    return subprocess.run(checked, capture_output=True, check=False).returncode == 0


def solve(app: Path) -> None:
    script = (FOLDER / "solution/solve.sh").read_text().replace("/app/", f"{app}/")
    subprocess.run(["bash", "-c", script], check=True)


def test_it_is_read_as_a_task_in_a_container_without_a_network() -> None:
    (task,) = tasks_from(f"harbor:{FOLDER}")
    assert task.id == "harbor_task"
    assert task.prompt == (FOLDER / "instruction.md").read_text()
    assert task.timeout_s == 600
    assert task.container is not None
    assert (task.container.network, task.container.memory_mb) == ("session", 1024)


def test_its_tests_accept_its_solution(app: Path) -> None:
    assert not accepted(app)
    solve(app)
    assert accepted(app)


def test_its_tests_refuse_duplicates_that_were_counted_and_sales_that_were_changed(
    app: Path,
) -> None:
    solve(app)
    right = (app / "totals.json").read_text()
    (app / "totals.json").write_text(json.dumps({**json.loads(right), "west": 630}))
    assert not accepted(app)
    (app / "totals.json").write_text(right)
    with (app / "sales.csv").open("a") as file:
        file.write("2026-03-07,east,1\n")
    assert not accepted(app)


def test_a_process_sandbox_refuses_it(
    bridle: Callable[..., Result], proxy_url: str, tmp_path: Path
) -> None:
    refused = bridle(
        *("rollout", "--agent", "oracle", "--tasks", f"harbor:{FOLDER}", "--proxy", proxy_url),
        *("--set", "agent.sandbox=process", "--set", f"agent.directory={tmp_path / 'sessions'}"),
    )
    assert refused.exit_code == 1
    assert "this task needs a container" in " ".join(refused.output.split())
