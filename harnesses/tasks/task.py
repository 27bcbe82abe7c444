"""Tasks: what a harness is asked to do, and where tasks come from.

A source of tasks is any iterable of :class:`Task`: a list, a generator, a JSON-lines file
(:func:`read_tasks`). :func:`tasks_from` resolves the name of one, as a command line gives it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from bridle.errors import UsageError


class TaskError(UsageError, ValueError):
    """A task source does not exist, raises, or holds something that is not a task."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do. Its id is unique within its suite and split."""

    id: str
    prompt: str
    """What the harness is told."""
    suite: str = "default"
    split: str = "train"
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What the verifier needs to know (expected answers); the harness never sees it."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Relative path -> text, written into the workspace before the harness starts."""

    def __post_init__(self) -> None:
        if not self.id:
            raise TaskError("a task needs an id")
        for name in self.files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise TaskError(f"task {self.id}: file {name!r} would lie outside the workspace")


def read_tasks(path: str | Path) -> Iterator[Task]:
    """Tasks of a JSON-lines file, one object per line; blank lines are skipped.

    Raises :class:`TaskError` with the line number when a line is not a task, or its id has been.
    """
    known: set[tuple[str, str, str]] = set()
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                task = _task(msgspec.json.decode(line))
                _remember(known, task)
            except (msgspec.DecodeError, TaskError) as error:
                raise TaskError(f"{path}, line {number}: {error}") from error
            yield task


def _task(given: Any) -> Task:
    task = msgspec.convert(given, Task)
    known = {field.name for field in fields(Task)}
    for name in given:
        if name not in known:
            raise TaskError(f"a task has no field {name!r}: what its verifier needs is its payload")
    return task


def _remember(known: set[tuple[str, str, str]], task: Task) -> None:
    """Adds a task to the ``known`` ones; raises :class:`TaskError` when it is among them."""
    key = task.suite, task.split, task.id
    if key in known:
        raise TaskError(f"suite {task.suite!r} has a {task.split} task {task.id!r} already")
    known.add(key)


def write_tasks(path: str | Path, tasks: Iterable[Task]) -> int:
    """Writes ``tasks`` as JSON lines and returns how many there were."""
    count = 0
    with Path(path).open("wb") as out:
        for task in tasks:
            out.write(msgspec.json.encode(task) + b"\n")
            count += 1
    return count


def tasks_from(source: str, split: str | None = None) -> Iterator[Task]:
    """Tasks of ``source``, only those of ``split`` when one is named.

    ``source`` is ``FILE.jsonl``, ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``; the function
    takes no argument and returns an iterable of tasks. Raises :class:`TaskError`, in the middle of
    the tasks when that is where the function fails.
    """
    for task in _open(source):
        if split is None or task.split == split:
            yield task


def _open(source: str) -> Iterable[Task]:
    if source.endswith(".jsonl"):
        if not Path(source).is_file():
            raise TaskError(f"task file {source} does not exist")
        return read_tasks(source)
    place, separator, name = source.rpartition(":")
    if not separator:
        raise TaskError(
            f"{source!r} is neither FILE.jsonl nor FILE.py:FUNCTION nor MODULE:FUNCTION"
        )
    function: Callable[[], Iterable[Task]] | None = getattr(load_module(place), name, None)
    if function is None:
        raise TaskError(f"{place} has no function {name!r}")
    return _made(source, function)


def _made(source: str, function: Callable[[], Iterable[Task]]) -> Iterator[Task]:
    known: set[tuple[str, str, str]] = set()
    try:
        for task in function():
            _remember(known, task)
            yield task
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        # Below this frame is what it called: the function, or what it gave and is read now.
        called = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][1:]
        said = _said(error, called[0] if called else None)
        raise TaskError(f"cannot get tasks from {source}: {said}") from error


def load_module(place: str, name: str | None = None) -> ModuleType:
    """The module at a path (``FILE.py``) or of a dotted name.

    ``name``: what a module at a path is called once loaded; the file's stem unless given. Raises
    :class:`TaskError` when there is none, or with what its code raised and in which line.
    """
    try:
        if place.endswith(".py"):
            return _load_file(place, name or Path(place).stem)
        return importlib.import_module(place)
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        file = next((frame.filename for frame in frames if frame.name == "<module>"), None)
        raise TaskError(f"cannot import {place}: {_said(error, file)}") from error


def _load_file(place: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None or not os.path.isfile(place):
        raise TaskError(f"module {place} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _said(error: BaseException, file: str | None) -> str:
    """The error in a line, with where in ``file`` it came up; a syntax error says that itself."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{said} ({file}, line {lines[-1]})" if lines else said
