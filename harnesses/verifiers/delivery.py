"""The work of an agent as it left it behind, and the contract of the verifiers that score it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bridle.errors import BridleError
from bridle.harnesses.sandboxes.base import Sandbox
from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.harnesses.sandboxes.spec import ContainerSpec
from bridle.harnesses.tasks.task import Task

Scores = Mapping[str, float]
Judgement = float | Scores
"""The value that a verifier function may return. A number is the reward."""

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
    bounds: Bounds = field(default_factory=Bounds)
    """The bounds of the session, which a verifier function has, too."""

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


def expected(task: Task, key: str) -> Any:
    """Return ``payload[key]`` of a task. Raise :class:`TaskUnfit` if there is none."""
    if key not in task.payload:
        raise TaskUnfit(f"the task has no {key!r} in its payload")
    return task.payload[key]


def scores_of(judgement: Any) -> dict[str, float]:
    """Return the scores of a function's value by name.

    Raise :class:`VerifierError` for a score that is not finite, and what ``float`` raises.
    """
    named = judgement if isinstance(judgement, Mapping) else {REWARD: judgement}
    scores = {str(name): float(value) for name, value in named.items()}
    for name, value in scores.items():
        if not math.isfinite(value):
            raise VerifierError(f"the verifier's {name} is {value}")
    return scores
