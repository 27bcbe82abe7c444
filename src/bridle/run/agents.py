"""The harness, sandbox, verifier and tasks that a user names."""

from __future__ import annotations

import itertools
import random
import shlex
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bridle.errors import UsageError
from bridle.harnesses.adapters import CODING_HARNESSES
from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.adapters.command import Command
from bridle.harnesses.adapters.environment_player import EnvironmentPlayer
from bridle.harnesses.adapters.mini_swe_agent import MiniSweAgent
from bridle.harnesses.adapters.oracle import Oracle
from bridle.harnesses.adapters.python_agent import PythonAgent
from bridle.harnesses.sandboxes import (
    ContainerProvider,
    ForkedProvider,
    ProcessProvider,
    SandboxProvider,
)
from bridle.harnesses.tasks import Task, TaskError, tasks_from
from bridle.harnesses.verifiers import (
    ExactAnswer,
    FunctionVerifier,
    NumberAnswer,
    RegexAnswer,
    Verifier,
)
from bridle.harnesses.verifiers.brought import TaskVerifier
from bridle.user_code import load_object

SandboxKind = Literal["process", "process-network", "forked", "container", "container-forked"]
SANDBOXES: dict[SandboxKind, Callable[[Adapter], SandboxProvider]] = {
    "process": lambda _: ProcessProvider(confined=True),
    "process-network": lambda _: ProcessProvider(),
    "forked": lambda _: ForkedProvider(),
    "container": lambda adapter: ContainerProvider(adapter.name),
    "container-forked": lambda adapter: _warm(adapter),
}
VERIFIERS: dict[str, type[Any]] = {
    "number": NumberAnswer,
    "exact": ExactAnswer,
    "regex": RegexAnswer,
    "task": TaskVerifier,
}


class UnknownAgent(UsageError, ValueError):
    """No harness or verifier has the name, or it does not fit the sandbox; the message has the
    choices."""


def _warm(adapter: Adapter) -> SandboxProvider:
    if not isinstance(adapter, MiniSweAgent):
        raise UnknownAgent(
            f"a forked container runs mini-swe-agent, not {adapter.name}: use --sandbox container"
        )
    return adapter.warm_containers()


def agent(
    named: str, sandbox: SandboxKind | None = None, tasks: Iterable[Task] = ()
) -> tuple[Adapter, SandboxProvider]:
    """Return an adapter and its sandboxes. Without a kind ``sandbox``, they are containers if one
    of ``tasks`` needs one, else of the kind that suits the adapter.

    ``named`` is an installed harness (``codex``), a Python script (``agent.py``), or a command line
    that contains ``{prompt}``. Raise :class:`UnknownAgent`.
    """
    adapter, suited = _agent(named)
    if sandbox is None and any(task.container for task in tasks):
        sandbox = "container"
    if sandbox == "container-forked" and any("harbor" in task.payload for task in tasks):
        raise UnknownAgent(
            "a Harbor task has /tests and /logs to itself, which sessions in one container share: "
            "use --sandbox container"
        )
    return adapter, suited() if sandbox is None else SANDBOXES[sandbox](adapter)


def _agent(named: str) -> tuple[Adapter, Callable[[], SandboxProvider]]:
    confined = partial(ProcessProvider, confined=True)
    if named == "mini-swe-agent":
        mini = MiniSweAgent()
        return mini, mini.sandboxes
    if named == "oracle":
        return Oracle(), ProcessProvider
    if named == "verifiers":
        return EnvironmentPlayer(), confined
    if named in CODING_HARNESSES:
        return CODING_HARNESSES[named](), confined
    if named.endswith(".py") and Path(named).is_file():
        return PythonAgent(Path(named)), ForkedProvider
    if "{prompt}" in named:
        argv = shlex.split(named)
        # A path or a placeholder may exist only in the session's workspace.
        if not set("/{") & set(argv[0]) and shutil.which(argv[0]) is None:
            raise UnknownAgent(f"cannot start {argv[0]}: there is no such command")
        return Command(tuple(argv), name=Path(argv[0]).name), confined
    raise UnknownAgent(
        f"{named!r} is not a Python script, not a command that contains {{prompt}}, and not one of "
        + ", ".join(CODING_HARNESSES)
    )


def verifier(named: str) -> Verifier:
    """Return a verifier: ``task`` (the task's own), ``number``, ``exact``, ``regex``, or a function
    as ``FILE.py:NAME`` or ``MODULE:NAME``.

    A function is called as :class:`bridle.harnesses.verifiers.FunctionVerifier` describes. Raise
    :class:`UnknownAgent` and :class:`bridle.user_code.UserCodeError`.
    """
    if named in VERIFIERS:
        found: Verifier = VERIFIERS[named]()
        return found
    if ":" not in named:
        raise UnknownAgent(f"{named!r} is not FILE.py:NAME and not one of {', '.join(VERIFIERS)}")
    function = load_object(named)
    if not callable(function):
        raise UnknownAgent(f"{named} is not a function")
    return FunctionVerifier(function)


def first_tasks(source: str, split: str | None, limit: int | None = None) -> list[Task]:
    """Return the tasks of ``source``: at least one, and at most ``limit``.

    Raise :class:`bridle.harnesses.tasks.TaskError` if there is none.
    """
    found = list(itertools.islice(tasks_from(source, split), limit))
    if not found:
        raise TaskError(f"{source} gives no task" + (f" of split {split!r}" if split else ""))
    return found


def shuffled_tasks(source: str, split: str | None, seed: int) -> list[Task]:
    """Return the tasks of ``source``, at least one, in an order that depends on ``seed``.

    Raise :class:`bridle.harnesses.tasks.TaskError` if there is none.
    """
    pool = first_tasks(source, split)
    random.Random(seed).shuffle(pool)
    return pool
