"""One task: the prompt for an agent, and the data for its verifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bridle.errors import UsageError
from bridle.harnesses.sandboxes.spec import ContainerSpec

Identity = tuple[str, str, str]
"""The suite, split and id of a task."""


class TaskError(UsageError, ValueError):
    """A task source does not exist, raises an error, or yields something that is not a task."""


@dataclass(frozen=True, slots=True)
class Step:
    """One of several prompts that an agent gets in one session, each verified before the next."""

    name: str
    prompt: str
    timeout_s: float | None = None
    user: str | None = None
    """The agent's user in a container, or ``None`` for the task's."""
    setup: str | None = None
    """A folder of this machine that is copied into the workspace first; its ``setup.sh`` is run."""
    min_rewards: Mapping[str, float] = field(default_factory=dict)
    """The session ends after this step when a reward named here is below its number."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do. Its id is unique within its suite and split."""

    id: str
    prompt: str
    """The text that the agent receives."""
    suite: str = "default"
    split: str = "train"
    payload: Mapping[str, Any] = field(default_factory=dict)
    """Data for the verifier, such as the expected answer. The agent never sees it."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that are written into the workspace before the agent starts. Each relative path maps to
    the text."""
    container: ContainerSpec | None = None
    """The container that the task needs, or ``None`` if it runs in any sandbox."""
    timeout_s: float | None = None
    """The time limit of the agent, or ``None`` for the rollout's."""
    steps: tuple[Step, ...] = ()
    """Steps that are run in place of ``prompt``, if there are any."""
    combine: Literal["mean", "final"] = "mean"
    """The rule that combines the rewards of steps into the session's."""

    def __post_init__(self) -> None:
        if not self.id:
            raise TaskError("a task needs an id")
        for name in self.files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise TaskError(f"task {self.id}: file {name!r} would lie outside the workspace")


def remember(known: set[Identity], task: Task) -> None:
    """Add a task's identity to ``known``. Raise :class:`TaskError` if it is in it already."""
    identity = task.suite, task.split, task.id
    if identity in known:
        raise TaskError(f"suite {task.suite!r} has a {task.split} task {task.id!r} already")
    known.add(identity)
