"""The loader of tasks in a JSON-lines file, one object per line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import msgspec

from bridle.harnesses.tasks.task import Identity, Task, TaskError, remember

_FIELDS: Final = frozenset(field.name for field in fields(Task))


def read_tasks(path: str | Path) -> Iterator[Task]:
    """Yield the tasks of a JSON-lines file; blank lines are skipped.

    Raise :class:`TaskError` with the line number for a line that is not a task, and for a task
    whose id an earlier line has.
    """
    if not Path(path).is_file():
        raise TaskError(f"task file {path} does not exist")
    known: set[Identity] = set()
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                task = _task(msgspec.json.decode(line))
                remember(known, task)
            except (msgspec.DecodeError, TaskError) as error:
                raise TaskError(f"{path}, line {number}: {error}") from error
            yield task


def _task(given: Any) -> Task:
    task = msgspec.convert(given, Task)
    for name in given:
        if name not in _FIELDS:
            raise TaskError(f"a task has no field {name!r}: data for the verifier is its payload")
    return task
