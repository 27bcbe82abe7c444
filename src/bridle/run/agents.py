"""Which harness, runtime and verifier a command line means."""

from __future__ import annotations

import itertools
import random
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridle.errors import UsageError
from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.adapters.claude_code import ClaudeCode
from bridle.harnesses.adapters.codex import Codex
from bridle.harnesses.adapters.command import Command
from bridle.harnesses.adapters.gemini_cli import GeminiCli
from bridle.harnesses.adapters.mini_swe_agent import MiniSweAgent
from bridle.harnesses.adapters.opencode import OpenCode
from bridle.harnesses.adapters.pi import Pi
from bridle.harnesses.adapters.python_agent import PythonAgent
from bridle.harnesses.adapters.qwen_code import QwenCode
from bridle.harnesses.sandboxes.base import Runtime
from bridle.harnesses.sandboxes.forked import WarmRuntime
from bridle.harnesses.sandboxes.process import LocalRuntime
from bridle.harnesses.tasks.task import Task, TaskError, load_module, tasks_from
from bridle.harnesses.verifiers import (
    ExactAnswer,
    FunctionVerifier,
    NumberAnswer,
    RegexAnswer,
    Verifier,
)

INSTALLED: dict[str, type[Any]] = {
    "codex": Codex,
    "claude-code": ClaudeCode,
    "qwen-code": QwenCode,
    "pi": Pi,
    "opencode": OpenCode,
    "gemini-cli": GeminiCli,
    "mini-swe-agent": MiniSweAgent,
}
RUNTIMES: dict[str, Callable[[], Runtime]] = {"mini-swe-agent": MiniSweAgent().runtime}
"""Of those that have one of their own."""
VERIFIERS: dict[str, type[Any]] = {
    "number": NumberAnswer,
    "exact": ExactAnswer,
    "regex": RegexAnswer,
}


class UnknownAgent(UsageError, ValueError):
    """The command line names something that is not there; the message says what is."""


def agent(named: str) -> tuple[Adapter, Runtime]:
    """An adapter and the runtime that suits it.

    ``named`` is an installed harness (``codex`` …), a Python script (``agent.py``), or a command
    line with ``{prompt}`` in it.
    """
    if named in INSTALLED:
        return INSTALLED[named](), RUNTIMES.get(named, LocalRuntime)()
    if named.endswith(".py") and Path(named).is_file():
        return PythonAgent(Path(named)), WarmRuntime()
    if "{prompt}" in named:
        argv = shlex.split(named)
        # What has a slash or a placeholder in it may come with the session's workspace.
        if not set("/{") & set(argv[0]) and shutil.which(argv[0]) is None:
            raise UnknownAgent(f"cannot start {argv[0]}: there is no such command")
        return Command(tuple(argv), name=Path(argv[0]).name), LocalRuntime()
    raise UnknownAgent(
        f"{named!r} is neither a Python script, nor a command with {{prompt}} in it, nor one of "
        + ", ".join(INSTALLED)
    )


def verifier(named: str) -> Verifier:
    """``number``, ``exact``, ``regex``, or ``FILE.py:NAME`` / ``MODULE:NAME`` of one of yours.

    Yours is whatever :class:`bridle.harnesses.verifiers.FunctionVerifier` takes: any function.
    """
    if named in VERIFIERS:
        found: Verifier = VERIFIERS[named]()
        return found
    place, separator, name = named.rpartition(":")
    if not separator:
        raise UnknownAgent(f"{named!r} is neither FILE.py:NAME nor one of {', '.join(VERIFIERS)}")
    try:
        module = load_module(place)
    except TaskError as error:
        raise UnknownAgent(str(error)) from error
    own = getattr(module, name, None)
    if own is None:
        raise UnknownAgent(f"{place} has no {name!r}")
    if not callable(own):
        raise UnknownAgent(f"{named} is no function")
    return FunctionVerifier(own)


def first_tasks(source: str, split: str | None, limit: int | None = None) -> list[Task]:
    """The tasks of ``source``, at most ``limit``; there is at least one.

    Raises :class:`bridle.harnesses.tasks.task.TaskError`.
    """
    found = list(itertools.islice(tasks_from(source, split), limit))
    if not found:
        raise TaskError(f"{source} gives no task" + (f" of split {split!r}" if split else ""))
    return found


def shuffled_tasks(source: str, split: str | None, seed: int) -> list[Task]:
    """The tasks of ``source`` in an order that ``seed`` decides; there is at least one.

    Raises :class:`bridle.harnesses.tasks.task.TaskError`.
    """
    pool = first_tasks(source, split)
    random.Random(seed).shuffle(pool)
    return pool


def training_work(
    named: str, verify: str, tasks: str, split: str | None, seed: int
) -> tuple[Adapter, Runtime, Verifier, list[Task]]:
    """The adapter, sandbox, verifier and tasks of a training run, the tasks in the order of
    :func:`shuffled_tasks`.

    Raises :class:`UnknownAgent` and :class:`bridle.harnesses.tasks.task.TaskError`.
    """
    return *agent(named), verifier(verify), shuffled_tasks(tasks, split, seed)
