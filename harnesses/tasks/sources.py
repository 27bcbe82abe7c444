"""The choice of a loader for a task source on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from bridle.harnesses.tasks.jsonl import read_tasks
from bridle.harnesses.tasks.python import function_tasks
from bridle.harnesses.tasks.task import Task, TaskError
from bridle.registry import Registry

SCHEMES: Final[Registry[Callable[[str], Iterable[Task]]]] = Registry(
    "task source",
    "bridle.tasks",
    {
        "harbor": "bridle.harnesses.tasks.harbor.loader:harbor_tasks",
        "verifiers": "bridle.harnesses.tasks.environments.loader:environment_tasks",
    },
)
"""The sources that are named as ``SCHEME:REFERENCE``. A part is a function from the reference to
the tasks."""


def tasks_from(source: str, split: str | None = None) -> Iterator[Task]:
    """Return the tasks of a source.

    A source is ``FILE.jsonl``, ``FILE.py:FUNCTION``, ``MODULE:FUNCTION``, or ``SCHEME:REFERENCE``
    with a scheme of :data:`SCHEMES`.

    With ``split`` only the tasks of that split are returned, with ``None`` all. Raise
    :class:`TaskError`; if the source fails in the middle of the tasks, it is raised there.
    """
    scheme, separator, reference = source.partition(":")
    tasks: Iterable[Task]
    if separator and scheme in SCHEMES.names():
        tasks = SCHEMES.get(scheme)(reference)
    elif source.endswith(".jsonl"):
        tasks = read_tasks(source)
    elif ":" in source:
        tasks = function_tasks(source)
    else:
        schemes = ", ".join(f"{name}:…" for name in SCHEMES.names())
        raise TaskError(
            f"{source!r} is not FILE.jsonl, FILE.py:FUNCTION, MODULE:FUNCTION, {schemes}"
        )
    return (task for task in tasks if split is None or task.split == split)
