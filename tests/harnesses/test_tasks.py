"""Task sources."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from bridle.harnesses.tasks import Task, TaskError, read_tasks, tasks_from
from bridle.user_code import UserCodeError, load_module

encode_lines = msgspec.json.Encoder().encode_lines

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

    path.write_bytes(encode_lines([TASK, Task("t2", "Again.")]))

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


def test_an_id_that_comes_again_in_its_suite_and_split_is_refused_with_its_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tasks.jsonl"
    apart = [Task("a", "p"), Task("a", "p", suite="other"), Task("a", "p", split="held_out")]
    path.write_bytes(encode_lines([*apart, Task("a", "q")]))
    tasks = read_tasks(path)
    assert [next(tasks) for _ in apart] == apart
    why = f"{path}, line 4: suite 'default' has a train task 'a' already"
    with pytest.raises(TaskError, match=f"^{re.escape(why)}$"):
        next(tasks)


@pytest.mark.parametrize("name", ["/etc/passwd", "../escape", "a/../../escape"])
def test_a_task_cannot_write_outside_its_workspace(name: str) -> None:
    with pytest.raises(TaskError, match="outside"):
        Task("t", "p", files={name: "x"})


def test_a_source_is_a_file_or_a_function_and_may_be_cut_to_a_split(tmp_path: Path) -> None:
    module = tmp_path / "made.py"
    module.write_text(
        "from bridle.harnesses.tasks.task import Task\n"
        "def make():\n"
        "    yield Task('a', 'p', split='train')\n"
        "    yield Task('b', 'p', split='held_out')\n"
    )
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(encode_lines(list(tasks_from(f"{module}:make"))))

    assert [task.id for task in tasks_from(str(path))] == ["a", "b"]
    assert [task.id for task in tasks_from(f"{module}:make", "held_out")] == ["b"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("missing.jsonl", "does not exist"),
        ("missing.py:make", "does not exist"),
        ("no.such.module:make", "cannot import"),
        ("bridle.harnesses.tasks:nothing", "has no 'nothing'"),
        ("whatever", "is not FILE.jsonl"),
    ],
)
def test_a_source_that_does_not_exist_says_so(source: str, why: str) -> None:
    with pytest.raises(TaskError, match=why):
        list(tasks_from(source))


RAISES_DEEPER = """
def wanted(given):
    return given["answer"]

wanted({})
"""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (RAISES_DEEPER, r"KeyError: 'answer' \({file}, line 3\)"),
        ("import json\njson.loads('')\n", r"JSONDecodeError: .* \({file}, line 2\)"),
        ("import nonesuch\n", r"ModuleNotFoundError: .*'nonesuch' \({file}, line 1\)"),
        ("import sys\nsys.exit(0)\n", r"SystemExit: 0 \({file}, line 2\)"),
        ("raise ValueError('one\\ntwo')\n", r"ValueError: one two \({file}, line 1\)"),
        ("x = 1\nx = = 2\n", r"SyntaxError: invalid syntax \(own\.py, line 2\)"),
    ],
)
def test_a_file_that_raises_is_named_with_the_line(tmp_path: Path, source: str, why: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(source)
    with pytest.raises(UserCodeError) as refused:
        load_module(str(file))
    said = re.escape(f"cannot import {file}: ") + why.replace("{file}", re.escape(str(file)))
    assert re.fullmatch(said, str(refused.value))


def test_a_module_that_raises_is_named_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "raising_checks.py"
    file.write_text("\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserCodeError) as refused:
        load_module("raising_checks")
    why = f"cannot import raising_checks: ZeroDivisionError: division by zero ({file}, line 2)"
    assert str(refused.value) == why


RAISING_FUNCTIONS = """
from bridle.harnesses.tasks.task import Task

ALL = [Task("a", "p")]

def named(given):
    return given["name"]

def at_once():
    return [Task("a", named({}))]

def later():
    yield Task("a", "p")
    yield Task("b", named({}))

def mapped():
    return map(named, [{}])

def nothing():
    return None

def ending():
    raise SystemExit(0)

def again():
    yield from ALL
    yield from ALL
    raise KeyError("too far")

def unfit():
    return [Task("", "p")]
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("at_once", "KeyError: 'name' ({file}, line 7)"),
        ("later", "KeyError: 'name' ({file}, line 7)"),
        ("mapped", "KeyError: 'name' ({file}, line 7)"),
        ("ending", "SystemExit: 0 ({file}, line 23)"),
        ("nothing", "TypeError: 'NoneType' object is not iterable"),
        ("ALL", "TypeError: 'list' object is not callable"),
    ],
)
def test_a_function_that_raises_is_named_with_the_line(tmp_path: Path, name: str, why: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(RAISING_FUNCTIONS)
    with pytest.raises(TaskError) as refused:
        list(tasks_from(f"{file}:{name}"))
    assert str(refused.value) == f"cannot get tasks from {file}:{name}: {why.format(file=file)}"


def test_a_function_whose_tasks_are_none_says_what_is_wrong_with_them(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(RAISING_FUNCTIONS)
    with pytest.raises(TaskError, match=r"^a task needs an id$"):
        list(tasks_from(f"{file}:unfit"))


def test_an_id_that_a_function_gives_again_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(RAISING_FUNCTIONS)
    with pytest.raises(TaskError, match=r"^suite 'default' has a train task 'a' already"):
        list(tasks_from(f"{file}:again"))


def test_tasks_before_the_one_that_raises_can_be_had(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(RAISING_FUNCTIONS)
    assert next(tasks_from(f"{file}:later")).id == "a"
