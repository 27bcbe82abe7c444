"""Which loader a task source on the command line means."""

from __future__ import annotations

from collections.abc import Iterator

from bridle.harnesses.tasks.jsonl import read_tasks
from bridle.harnesses.tasks.python import function_tasks
from bridle.harnesses.tasks.task import Task, TaskError


def tasks_from(source: str, split: str | None = None) -> Iterator[Task]:
    """Tasks of ``FILE.jsonl``, ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``.

    ``split``: only tasks of that split; ``None``: all. Raises :class:`TaskError`, in the middle of
    the tasks where the source fails there.
    """
    if source.endswith(".jsonl"):
        tasks = read_tasks(source)
    elif ":" in source:
        tasks = function_tasks(source)
    else:
        raise TaskError(f"{source!r} is not FILE.jsonl, FILE.py:FUNCTION or MODULE:FUNCTION")
    return (task for task in tasks if split is None or task.split == split)
