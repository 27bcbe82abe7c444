"""The editing tasks as Harbor folders: an installed agent does them in containers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.episode import Outcome
from bridle.harnesses.rollout import Job, RolloutSettings
from bridle.harnesses.tasks.task import Task
from bridle.recipes.reproduce import editing
from bridle.recipes.reproduce.course import Editing
from bridle.recipes.reproduce.folders import HarborFolders
from bridle.run.agents import UnknownAgent, agent
from bridle.run.rollouts import rollout

pytestmark = pytest.mark.containers


def one_of_each() -> list[Task]:
    tasks = editing.tasks("train")
    return [next(t for t in tasks if t.id.startswith(f"{kind.name}-")) for kind in editing.KINDS]


@pytest.mark.parametrize(("named", "reward"), [("oracle", 1.0), ("true {prompt}", 0.0)])
def test_a_folder_pays_its_solution_and_nothing_else(
    stage: Any, tmp_path: Path, named: str, reward: float
) -> None:
    bench = stage(editing.teacher([], skill=1.0))
    folders = HarborFolders(tmp_path / "tasks")
    tasks = [folders.task(task) for task in one_of_each()]

    results = rollout(named, tasks, "task", proxy=bench.url, directory=tmp_path / "runs")

    got = {result.task_id: (result.error, result.scores) for result in results}
    assert got == {task.id: ("", {"reward": reward}) for task in tasks}


def test_a_taught_agent_edits_in_containers(stage: Any, tmp_path: Path) -> None:
    course = Editing("mini-swe-agent", tmp_path / "tasks")
    tasks = course.tasks("train", 10)
    bench = stage(course.teacher(tasks, 0.5))
    settings = RolloutSettings(
        tmp_path / "runs", session_settings=course.session_settings(1.0), timeout_s=120, retries=0
    )

    with course.rollouts(bench.url, None) as rollouts:
        results = rollouts.collect(course.agent(1.0), [Job(task) for task in tasks], settings)

    assert [(r.outcome, r.error) for r in results] == [(Outcome.COMPLETED, "")] * len(tasks)
    rewards = {result.task_id: result.scores["reward"] for result in results}
    assert set(rewards.values()) == {0.0, 1.0}, "the teacher is right about half of the time"


def test_sessions_in_one_container_are_refused_for_a_harbor_task(tmp_path: Path) -> None:
    task = HarborFolders(tmp_path).task(one_of_each()[0])
    with pytest.raises(UnknownAgent, match="use --sandbox container"):
        agent("mini-swe-agent", "container-forked", [task])


@pytest.mark.skipif("BRIDLE_HARBOR" not in os.environ, reason="BRIDLE_HARBOR names no harbor")
def test_harbors_own_validation_accepts_a_folder(tmp_path: Path) -> None:
    (task, *_) = one_of_each()
    folder = HarborFolders(tmp_path).task(task).payload["harbor"]
    python = Path(os.environ["BRIDLE_HARBOR"]).with_name("python")
    script = "import sys; from harbor.models.task.task import Task; Task(sys.argv[1]); "
    script += "assert Task.is_valid_dir(sys.argv[1])"

    subprocess.run([python, "-c", script, str(folder)], check=True)
