"""The plan of a training run's groups."""

from __future__ import annotations

from bridle.harnesses.client import Origin
from bridle.harnesses.tasks.task import Task
from bridle.run.groups import BranchedTask, FinishedGroups, planned

TASKS = [Task(f"t{number}", "do it") for number in range(3)]


def test_tasks_are_taken_in_turn_and_only_what_is_missing_is_run() -> None:
    finished = FinishedGroups(sessions={1: ["a", "b"]})
    plan = planned("run", TASKS, 3, finished)
    assert [plan(number).jobs[0].task.id for number in range(4)] == ["t0", "t1", "t2", "t0"]
    assert (plan(1).finished, len(plan(1).jobs)) == (("a", "b"), 1)
    assert {job.group_id for job in plan(2).jobs} == {"run.2"}


def test_a_group_that_was_begun_keeps_its_task_whatever_is_drawn_now() -> None:
    begun = f"{TASKS[2].suite}/{TASKS[2].split}/t2"
    plan = planned("run", TASKS, 1, FinishedGroups(tasks={5: begun}), choose=lambda _: 0)
    assert plan(5).jobs[0].task.id == "t2"
    assert plan(6).jobs[0].task.id == "t0"


def test_a_groups_sessions_have_its_settings() -> None:
    plan = planned("run", TASKS, 2, settings=lambda number, _: {"budget": {"calls": number}})
    assert [job.settings for job in plan(4).jobs] == [{"budget": {"calls": 4}}] * 2


def test_groups_of_siblings_have_an_origin_and_its_task() -> None:
    task = f"{TASKS[2].suite}/{TASKS[2].split}/t2"
    origin, before = Origin("ses_a", "call_a"), Origin("ses_b", "call_b")
    earlier = FinishedGroups(tasks={3: task}, origins={3: before})

    def branch(number: int) -> BranchedTask | None:
        return BranchedTask(task, origin) if number % 2 else None

    plan = planned("run", TASKS, 2, earlier, branch=branch)
    assert [job.origin for job in plan(1).jobs] == [origin] * 2
    assert plan(1).jobs[0].task.id == "t2"
    assert plan(1).jobs[0].settings["replay"] == {"on_divergence": "live"}
    assert (plan(2).jobs[0].origin, plan(2).jobs[0].settings) == (None, {})
    assert plan(3).jobs[0].origin == before
