"""The harness, sandbox, verifier and tasks that a user names."""

from __future__ import annotations

import inspect
import itertools
import random
import shlex
import shutil
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from bridle.errors import UsageError
from bridle.harnesses.adapters import ADAPTERS, Adapter, Command, PythonAgent
from bridle.harnesses.adapters.base import Housed
from bridle.harnesses.adapters.mini_swe_agent import MiniSweAgent
from bridle.harnesses.sandboxes import (
    ContainerProvider,
    ForkedProvider,
    ProcessProvider,
    SandboxProvider,
)
from bridle.harnesses.tasks import Task, TaskError, tasks_from
from bridle.harnesses.verifiers import (
    Delivery,
    FunctionVerifier,
    Judgement,
    SeparateFunction,
    Verifier,
)
from bridle.registry import Options, Registry

SANDBOXES: Final[Registry[Callable[[Adapter], SandboxProvider]]] = Registry(
    "sandbox", "bridle.sandboxes"
)
"""The kinds of sandboxes. A part is a function that makes a provider for an adapter."""
SANDBOXES.register("process", lambda _: ProcessProvider(confined=True))
SANDBOXES.register("process-network", lambda _: ProcessProvider())
SANDBOXES.register("forked", lambda _: ForkedProvider(confined=True))
SANDBOXES.register("container", lambda adapter: ContainerProvider(adapter.name))
SANDBOXES.register("container-forked", lambda adapter: _warm(adapter))

VERIFIERS: Final[
    Registry[type[Verifier] | Callable[[Delivery], Judgement | Awaitable[Judgement]]]
] = Registry(
    "verifier",
    "bridle.verifiers",
    {
        "number": "bridle.harnesses.verifiers:NumberAnswer",
        "exact": "bridle.harnesses.verifiers:ExactAnswer",
        "regex": "bridle.harnesses.verifiers:RegexAnswer",
        "task": "bridle.harnesses.verifiers.brought:TaskVerifier",
    },
)
"""The verifiers. A part is a function as :class:`bridle.harnesses.verifiers.FunctionVerifier`
describes it, or a class of verifiers that is made without arguments."""


class UnknownAgent(UsageError, ValueError):
    """A harness or verifier is unknown or does not fit the sandbox; the message has the choices."""


def _warm(adapter: Adapter) -> SandboxProvider:
    if not isinstance(adapter, MiniSweAgent):
        raise UnknownAgent(
            f"a forked container runs mini-swe-agent, not {adapter.name}: use "
            "--set agent.sandbox=container"
        )
    return adapter.warm_containers()


def agent(
    named: str,
    sandbox: str | None = None,
    tasks: Iterable[Task] = (),
    options: Options = MappingProxyType({}),
) -> tuple[Adapter, SandboxProvider]:
    """Return an adapter and its sandboxes.

    Without a ``sandbox``, which names one of :data:`SANDBOXES`, they are containers if one of
    ``tasks`` needs one, else of the kind that suits the adapter.

    ``named`` is a harness (``codex``, or another of :data:`bridle.harnesses.adapters.ADAPTERS`), a
    Python script (``agent.py``), or a command line that contains ``{prompt}``. ``options`` are the
    own options of harnesses and sandboxes by name. Raise :class:`UnknownAgent`, and the errors of
    :meth:`bridle.registry.Registry.get`.
    """
    adapter, suited = _agent(named, options)
    if sandbox is None and any(task.container for task in tasks):
        sandbox = "container"
    if sandbox == "container-forked" and any("harbor" in task.payload for task in tasks):
        raise UnknownAgent(
            "a Harbor task has /tests and /logs to itself, which sessions in one container share: "
            "use --set agent.sandbox=container"
        )
    return adapter, suited() if sandbox is None else SANDBOXES.configured(sandbox, options)(adapter)


def _agent(named: str, options: Options) -> tuple[Adapter, Callable[[], SandboxProvider]]:
    confined = partial(ProcessProvider, confined=True)
    if named.endswith(".py") and Path(named).is_file():
        return PythonAgent(Path(named)), partial(ForkedProvider, confined=True)
    if "{prompt}" in named:
        argv = shlex.split(named)
        # A path or a placeholder may exist only in the session's workspace.
        if not set("/{") & set(argv[0]) and shutil.which(argv[0]) is None:
            raise UnknownAgent(f"cannot start {argv[0]}: there is no such command")
        return Command(tuple(argv), name=Path(argv[0]).name), confined
    if ":" not in named and named not in ADAPTERS.names():
        raise UnknownAgent(
            f"{named!r} is not a Python script, not a command that contains {{prompt}}, and not "
            + ADAPTERS.forms
        )
    adapter = ADAPTERS.configured(named, options)()
    return adapter, adapter.sandboxes if isinstance(adapter, Housed) else confined


def verifier(named: str, options: Options = MappingProxyType({})) -> Verifier:
    """Return the verifier that ``named`` names, of :data:`VERIFIERS`, with its own of ``options``.

    Raise :class:`UnknownAgent`, and the errors of :meth:`bridle.registry.Registry.get`.
    """
    part = VERIFIERS.get(named)
    if not callable(part):
        raise UnknownAgent(f"{named} is not a function")
    made: Any = VERIFIERS.configured(named, options)
    if isinstance(part, type):
        verifier: Verifier = made()
        return verifier
    within, reference = FunctionVerifier(made), VERIFIERS.reference(named)
    if reference is None or _is_async(part):
        return within
    return SeparateFunction(reference, options.get(named.rpartition(":")[2], {}), within)


def _is_async(part: object) -> bool:
    call = part if inspect.isroutine(part) else type(part).__call__
    return inspect.iscoroutinefunction(call)


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
