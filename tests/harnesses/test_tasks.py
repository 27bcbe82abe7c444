"""Task sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from harnesses.tasks import Task, TaskError, read_tasks, tasks_from, write_tasks

TASK = Task(
    id="t1",
    suite="s",
    split="held_out",
    prompt="Do it.",
    payload={"answer": 4},
    files={"a/b.txt": "text"},
)


def test_tasks_survive_a_jsonl_file(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"

    assert write_tasks(path, [TASK, Task("t2", "Again.")]) == 2

    assert list(read_tasks(path)) == [TASK, Task("t2", "Again.")]


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "prompt": "p"}\n\n{"id": "b"}\n')

    with pytest.raises(TaskError, match=r"line 3: .*prompt"):
        list(read_tasks(path))


def test_a_field_that_tasks_do_not_have_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "prompt": "p", "answer": 4}\n')

    with pytest.raises(TaskError, match=r"line 1: .*no field 'answer'.*payload"):
        list(read_tasks(path))


@pytest.mark.parametrize("name", ["/etc/passwd", "../escape", "a/../../escape"])
def test_a_task_cannot_write_outside_its_workspace(name: str) -> None:
    with pytest.raises(TaskError, match="outside"):
        Task("t", "p", files={name: "x"})


def test_a_source_is_a_file_or_a_function_and_may_be_cut_to_a_split(tmp_path: Path) -> None:
    module = tmp_path / "made.py"
    module.write_text(
        "from harnesses.tasks import Task\n"
        "def make():\n"
        "    yield Task('a', 'p', split='train')\n"
        "    yield Task('b', 'p', split='held_out')\n"
    )
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, tasks_from(f"{module}:make"))

    assert [task.id for task in tasks_from(str(path))] == ["a", "b"]
    assert [task.id for task in tasks_from(f"{module}:make", "held_out")] == ["b"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("missing.jsonl", "does not exist"),
        ("missing.py:make", "does not exist"),
        ("no.such.module:make", "cannot import"),
        ("harnesses.tasks:nothing", "no function 'nothing'"),
        ("whatever", "neither"),
    ],
)
def test_a_source_that_does_not_exist_says_so(source: str, why: str) -> None:
    with pytest.raises(TaskError, match=why):
        list(tasks_from(source))
