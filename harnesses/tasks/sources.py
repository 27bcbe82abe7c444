"""The choice of a loader for a task source on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bridle.harnesses.tasks.environments.loader import environment_tasks
from bridle.harnesses.tasks.harbor.loader import harbor_tasks
from bridle.harnesses.tasks.jsonl import read_tasks
from bridle.harnesses.tasks.python import function_tasks
from bridle.harnesses.tasks.task import Task, TaskError

SOURCES: Final = "FILE.jsonl, FILE.py:FUNCTION, MODULE:FUNCTION, harbor:PATH or verifiers:NAME"


def tasks_from(source: str, split: str | None = None) -> Iterator[Task]:
    """Return the tasks of ``FILE.jsonl``, ``FILE.py:FUNCTION``, ``MODULE:FUNCTION``,
    ``harbor:PATH`` or ``verifiers:NAME``.

    With ``split`` only the tasks of that split are returned, with ``None`` all. Raise
    :class:`TaskError`; if the source fails in the middle of the tasks, it is raised there.
    """
    if source.startswith("harbor:"):
        tasks = harbor_tasks(source.removeprefix("harbor:"))
    elif source.startswith("verifiers:"):
        tasks = environment_tasks(source.removeprefix("verifiers:"))
    elif source.endswith(".jsonl"):
        tasks = read_tasks(source)
    elif ":" in source:
        tasks = function_tasks(source)
    else:
        raise TaskError(f"{source!r} is not {SOURCES}")
    return (task for task in tasks if split is None or task.split == split)
