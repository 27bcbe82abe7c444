"""Tasks and their sources: one loader per file, chosen by :func:`tasks_from`.

A source of tasks is any iterable of :class:`Task`: a list, a generator, a JSON-lines file, or a
function of the user's.
"""

from bridle.harnesses.tasks.jsonl import read_tasks
from bridle.harnesses.tasks.sources import tasks_from
from bridle.harnesses.tasks.task import Task, TaskError

__all__ = ["Task", "TaskError", "read_tasks", "tasks_from"]
