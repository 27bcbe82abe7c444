"""Verifiers, which score a session by what the agent left behind: its answer and its workspace.

A verifier is an async callable from a :class:`Delivery` to named scores. It does not see the
recorded calls, so that a reward cannot depend on the style of the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bridle.errors import BridleError
from bridle.harnesses.sandboxes.base import DirectoryGone, Launch, Sandbox
from bridle.harnesses.sandboxes.folder import Folder
from bridle.harnesses.sandboxes.spec import ContainerSpec
from bridle.harnesses.tasks.task import Task

Scores = Mapping[str, float]
Judgement = float | Scores
"""The value that a verifier function may return. A number is the reward."""

Returned = TypeVar("Returned")

REWARD = "reward"
"""The name under which the built-in verifiers report their score, and which the trainer reads."""


class VerifierError(BridleError):
    """The verifier could not reach a verdict.

    This is not the agent's fault, and not a score of zero.
    """

    retryable = True


class TaskUnfit(VerifierError):
    """The task lacks data that its verifier needs, so every attempt fails."""

    retryable = False


class NoVerdict(VerifierError):
    """The task's own tests ended without a verdict, and would do so again."""

    retryable = False


@dataclass(frozen=True, slots=True)
class Delivery:
    """The result of an agent's work, as it left it behind."""

    task: Task
    answer: str
    """The agent's final answer, or ``""`` if it failed or gave none."""
    workspace: Path
    """The agent's working directory. A function that verifies a container reads a copy of it."""
    exit_code: int | None
    """The agent's exit code, or ``None`` if it was killed at its time limit."""
    sandbox: Sandbox
    another: Callable[[ContainerSpec], AbstractAsyncContextManager[Sandbox]] | None = None
    """A function that opens a second sandbox, which receives nothing of the agent's by itself."""

    def open_another(self, spec: ContainerSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Open a second sandbox. Raise :class:`VerifierError` if there can be only one."""
        if self.another is None:
            raise VerifierError("this task is verified in a second container: none can be opened")
        return self.another(spec)


class Verifier(Protocol):
    """A verifier, which scores a delivery.

    It raises :class:`VerifierError` if it reaches no verdict.
    """

    async def __call__(self, delivery: Delivery) -> Scores: ...


@dataclass(frozen=True, slots=True)
class ExactAnswer:
    """A verifier that gives 1.0 if the answer equals ``payload[key]``.

    Surrounding space and letter case do not matter.
    """

    key: str = "answer"

    async def __call__(self, delivery: Delivery) -> Scores:
        wanted = str(_expected(delivery.task, self.key))
        return {REWARD: float(_folded(delivery.answer) == _folded(wanted))}


@dataclass(frozen=True, slots=True)
class NumberAnswer:
    """A verifier that gives 1.0 if the answer's only number equals ``payload[key]``.

    An answer that lists several numbers is wrong, so naming them all does not pay. Thousands
    separators (``1,250``) and a trailing ``.0`` do not matter.
    """

    key: str = "answer"
    tolerance: float = 1e-9

    async def __call__(self, delivery: Delivery) -> Scores:
        stated = _expected(delivery.task, self.key)
        try:
            wanted = float(stated)
        except (TypeError, ValueError) as error:
            raise TaskUnfit(f"the task's {self.key} is {stated!r}, no number") from error
        numbers = numbers_in(delivery.answer)
        right = len(numbers) == 1 and abs(numbers[0] - wanted) <= self.tolerance
        return {REWARD: float(right)}


@dataclass(frozen=True, slots=True)
class RegexAnswer:
    """A verifier that gives 1.0 if a pattern matches in the answer.

    The pattern is ``pattern`` or else ``payload["pattern"]``.
    """

    pattern: str | None = None

    async def __call__(self, delivery: Delivery) -> Scores:
        pattern = self.pattern or str(_expected(delivery.task, "pattern"))
        try:
            found = re.search(pattern, delivery.answer)
        except re.error as error:
            raise TaskUnfit(f"the task's pattern is {pattern!r}: {error}") from error
        return {REWARD: float(found is not None)}


@dataclass(frozen=True, slots=True)
class CommandVerifier:
    """A verifier that gives 1.0 if a shell command in the workspace exits with 0.

    The command is, for example, a test suite. Without ``command`` it runs ``payload["verify"]``.
    The command's environment contains no provider key. The command and everything that it started
    are killed after ``timeout_s`` seconds, which scores 0. A workspace that the agent has removed
    scores 0, too.
    """

    command: str | None = None
    timeout_s: float = 60.0

    async def __call__(self, delivery: Delivery) -> Scores:
        command = self.command or str(_expected(delivery.task, "verify"))
        sandbox = delivery.sandbox
        launch = Launch(
            ("/bin/sh", "-c", command),
            sandbox.place.environment,
            self.timeout_s,
            role="verifier",
            directory=delivery.workspace,
        )
        try:
            finished = await sandbox.exec(launch)
        except DirectoryGone:
            return {REWARD: 0.0}
        return {REWARD: float(finished.exit_code == 0)}


@dataclass(frozen=True, slots=True)
class FunctionVerifier:
    """A verifier from any function that maps a delivery to a number or to named scores.

    A plain function runs in a thread, which cannot be stopped: if the verifier is cancelled, the
    function runs on. An exception of the function and a score that is not finite become a
    :class:`VerifierError`. A function that takes more than ``timeout_s`` seconds reaches no
    verdict.
    """

    function: Callable[[Delivery], Judgement | Awaitable[Judgement]]
    timeout_s: float = 600.0

    async def __call__(self, delivery: Delivery) -> Scores:
        if not isinstance(delivery.sandbox, Folder):
            delivery = await _with_copy(delivery)
        try:
            judged = await asyncio.wait_for(_judged(self.function, delivery), self.timeout_s)
            named = judged if isinstance(judged, Mapping) else {REWARD: judged}
            scores = {name: float(value) for name, value in named.items()}
        except VerifierError:
            raise
        except TimeoutError as error:
            raise NoVerdict(f"the verifier took more than {self.timeout_s:g} s") from error
        except Exception as error:
            raise VerifierError(f"the verifier raised {type(error).__name__}: {error}") from error
        for name, value in scores.items():
            if not math.isfinite(value):
                raise VerifierError(f"the verifier's {name} is {value}")
        return scores


async def _with_copy(delivery: Delivery) -> Delivery:
    """Return the delivery with a copy of its workspace on this machine.

    The copy is empty if there is no workspace.
    """
    copy = delivery.sandbox.directory / "workspace"
    copy.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        await delivery.sandbox.download(delivery.sandbox.place.workspace, copy)
    return replace(delivery, workspace=copy)


async def _judged(
    function: Callable[[Delivery], Judgement | Awaitable[Judgement]], delivery: Delivery
) -> Judgement:
    given = await _in_thread(function, delivery)
    return await given if isinstance(given, Awaitable) else given


async def _in_thread(function: Callable[[Delivery], Returned], delivery: Delivery) -> Returned:
    """Run a function in a daemon thread.

    A program waits at its end for the threads of ``asyncio.to_thread``, so a function that hangs
    there would make Ctrl-C ineffective.
    """
    judged: Future[Returned] = Future()
    judged.set_running_or_notify_cancel()

    def judge() -> None:
        try:
            judged.set_result(function(delivery))
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            judged.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - `sys.exit` ends the verifier, not the run
            judged.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=judge, name="verifier", daemon=True).start()
    return await asyncio.wrap_future(judged)


_MINUS = "\N{MINUS SIGN}"
_NUMBER = re.compile(
    rf"[-{_MINUS}]?(?:\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\w.])\.\d+)"
)


def numbers_in(text: str) -> list[float]:
    """Return every number in ``text``, in order."""
    found = (number.replace(",", "").replace(_MINUS, "-") for number in _NUMBER.findall(text))
    return [float(number) for number in found]


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


def _expected(task: Task, key: str) -> Any:
    if key not in task.payload:
        raise TaskUnfit(f"the task has no {key!r} in its payload")
    return task.payload[key]
