"""The work of an agent as it left it behind, and the contract of the verifiers that score it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from bridle.errors import BridleError
from bridle.harnesses.sandboxes.base import Sandbox
from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.harnesses.sandboxes.spec import ContainerSpec
from bridle.harnesses.tasks.task import Task
from bridle.store.reward import FindingMode, Reward, RewardKind, RewardSource
from bridle.user_code import describe_raised

Scores = Mapping[str, float]
"""Rewards of the session as a whole, by name."""


@dataclass(frozen=True, slots=True)
class Score:
    """A reward that a verifier or a scorer returns, with its place in the session.

    The place is one of ``role``, ``branch``, ``call_id`` and ``turn``, or the session if none is
    given. Turns count the session's calls from 1.
    """

    name: str
    value: float
    role: str | None = None
    branch: str | None = None
    """The id of the call that ends the branch."""
    call_id: str | None = None
    turn: int | None = None
    kind: RewardKind = RewardKind.SCORE
    mode: FindingMode | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Return whether it is a score of the session as a whole."""
        places = (self.role, self.branch, self.call_id, self.turn)
        return self.kind is RewardKind.SCORE and places == (None, None, None, None)

    def reward(self, session_id: str, source: RewardSource = RewardSource.VERIFIER) -> Reward:
        """Return the reward of a session, given now. Raise ``ValueError`` as :class:`Reward`."""
        facts = {one.name: getattr(self, one.name) for one in fields(self)}
        return Reward(session_id, created_at=time.time(), source=source, **facts)


Verdict = Scores | tuple[Score, ...]
"""The rewards of the session as a whole by name, or rewards with their places."""
Judgement = float | Scores | Iterable[Score]
"""The value that a verifier function may return. A number is the reward."""

REWARD = "reward"
"""The name under which the built-in verifiers report their score, and which the trainer reads."""


class VerifierError(BridleError):
    """The verifier could not reach a verdict.

    This is not the agent's fault, and not a score of zero.
    """

    retryable = True


class FunctionFault(VerifierError):
    """The function that scores raised an error, or returned something that is no reward."""


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

    async def __call__(self, delivery: Delivery) -> Verdict: ...


def expected(task: Task, key: str) -> Any:
    """Return ``payload[key]`` of a task. Raise :class:`TaskUnfit` if there is none."""
    if key not in task.payload:
        raise TaskUnfit(f"the task has no {key!r} in its payload")
    return task.payload[key]


def verdict_of(judgement: Any) -> Verdict:
    """Return the rewards in a function's value.

    Raise :class:`FunctionFault` for a reward that is not finite or has several places, and what
    ``float`` raises.
    """
    if isinstance(judgement, Iterable) and not isinstance(judgement, Mapping | str | bytes):
        return tuple(map(_checked, judgement))
    named = judgement if isinstance(judgement, Mapping) else {REWARD: judgement}
    scores = {str(name): float(value) for name, value in named.items()}
    for name, value in scores.items():
        if not math.isfinite(value):
            raise FunctionFault(f"the verifier's {name} is {value}")
    return scores


def fault_of(function: Callable[..., Any], error: BaseException) -> VerifierError:
    """Return the error of a function that raised ``error``.

    An assertion that fails is a statement of the function about the session, and no fault of it.
    """
    kind = VerifierError if isinstance(error, AssertionError) else FunctionFault
    return kind(f"the verifier raised {describe_raised(error, function)}")


def scores_in(verdict: Verdict) -> tuple[Score, ...]:
    """Return the rewards of a verdict, each with its place."""
    if isinstance(verdict, Mapping):
        return tuple(Score(name, value) for name, value in verdict.items())
    return verdict


def whole_scores(scores: Iterable[Score]) -> dict[str, float]:
    """Return the scores of the session as a whole, by name."""
    return {one.name: one.value for one in scores if one.is_whole}


def _checked(score: Any) -> Score:
    if not isinstance(score, Score):
        raise FunctionFault(
            f"{score!r} is no reward: return a number, numbers by name, or bridle.Score objects"
        )
    try:
        score.reward("")
    except (TypeError, ValueError) as error:
        raise FunctionFault(str(error)) from error
    return score
