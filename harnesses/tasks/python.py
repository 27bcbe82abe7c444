"""The loader of tasks from a user's function, ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator

from bridle.errors import UsageError
from bridle.harnesses.tasks.task import Identity, Task, TaskError, remember
from bridle.user_code import describe, load_object


def function_tasks(named: str) -> Iterator[Task]:
    """Yield the tasks that the function yields or returns. The function takes no argument.

    Raise :class:`TaskError`: at once if there is no such function, later if it fails.
    """
    try:
        function: Callable[[], Iterable[Task]] = load_object(named)
    except UsageError as error:
        raise TaskError(str(error)) from error
    return _called(named, function)


def _called(named: str, function: Callable[[], Iterable[Task]]) -> Iterator[Task]:
    known: set[Identity] = set()
    try:
        for task in function():
            remember(known, task)
            yield task
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        # The frame below this one is the function's, or that of the iterator it returned.
        called = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][1:]
        text = describe(error, called[0] if called else None)
        raise TaskError(f"cannot get tasks from {named}: {text}") from error
