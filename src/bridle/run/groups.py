"""The groups of a training run: their names in the store, and what earlier attempts have finished.

Group ``n`` of a run has the id ``RUN.n``. A session of it that was sealed with an outcome that says
something about the agent is finished, whatever became of the trainer: it is trained, not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bridle.harnesses.episode import Outcome
from bridle.harnesses.rollout import Job
from bridle.harnesses.tasks.task import Task
from bridle.store.reading.queries import Reader

FINISHED: Final = frozenset(
    {Outcome.COMPLETED, Outcome.AGENT_ERROR, Outcome.TIMEOUT, Outcome.QUARANTINED}
)
"""Outcomes of sessions that are not run again."""


def group_id(run_id: str, number: int) -> str:
    """The id of a run's group ``number``."""
    return f"{run_id}.{number}"


@dataclass(frozen=True, slots=True)
class FinishedGroups:
    """The finished sessions of a run, as earlier attempts left them."""

    sessions: dict[int, list[str]] = field(default_factory=dict)
    """Session ids by group number, oldest first."""

    @classmethod
    def of(cls, reader: Reader, run_id: str) -> FinishedGroups:
        found = cls()
        for session in reader.sessions(run=run_id, sealed=True):
            own, _, number = (session.group_id or "").rpartition(".")
            if own == run_id and number.isdecimal() and session.outcome in FINISHED:
                found.sessions.setdefault(int(number), []).append(session.id)
        return found


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What a group still needs."""

    finished: tuple[str, ...]
    """Sessions of an earlier attempt."""
    jobs: tuple[Job, ...]
    """Sessions to run."""


def planned(
    run_id: str,
    tasks: Sequence[Task],
    size: int,
    finished: FinishedGroups | None = None,
) -> Callable[[int], GroupPlan]:
    """The plan of each group by its number: tasks are taken in turn, each by ``size`` sessions."""
    earlier = finished or FinishedGroups()

    def plan(number: int) -> GroupPlan:
        task = tasks[number % len(tasks)]
        done = tuple(earlier.sessions.get(number, ())[:size])
        job = Job(task, group_id(run_id, number))
        return GroupPlan(done, (job,) * (size - len(done)))

    return plan
