"""The groups of a training run: their ids in the store, and the sessions finished earlier.

Earlier attempts at the run have finished those sessions.

Group ``n`` of a run has the id ``RUN.n``. A session of it is finished if it was sealed with an
outcome that shows how the agent did. It is then trained and not run again, even if the trainer was
stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bridle.harnesses.client import Origin
from bridle.harnesses.episode import Outcome
from bridle.harnesses.rollout import Job
from bridle.harnesses.tasks.task import Task
from bridle.reconstruct.evaluation import task_key
from bridle.store.reading.queries import Reader

FINISHED: Final = frozenset(
    {Outcome.COMPLETED, Outcome.AGENT_ERROR, Outcome.TIMEOUT, Outcome.QUARANTINED}
)
"""The outcomes of sessions that are not run again."""


def group_id(run_id: str, number: int) -> str:
    return f"{run_id}.{number}"


@dataclass(frozen=True, slots=True)
class FinishedGroups:
    """The finished sessions of a run, as earlier attempts left them."""

    sessions: dict[int, list[str]] = field(default_factory=dict)
    """The session ids by group number, oldest first."""
    tasks: dict[int, str] = field(default_factory=dict)
    """The key of the task of each group that was begun, by group number."""
    origins: dict[int, Origin] = field(default_factory=dict)
    """The origin of each group of siblings that was begun, by group number."""

    @classmethod
    def of(cls, reader: Reader, run_id: str) -> FinishedGroups:
        found = cls()
        for session in reader.sessions(run=run_id):
            own, _, number = (session.group_id or "").rpartition(".")
            if own != run_id or not number.isdecimal():
                continue
            found.tasks[int(number)] = task_key(session)
            if session.origin_session_id is not None:
                origin = Origin(session.origin_session_id, session.origin_call_id)
                found.origins[int(number)] = origin
            if session.sealed_at is not None and session.outcome in FINISHED:
                found.sessions.setdefault(int(number), []).append(session.id)
        return found


@dataclass(frozen=True, slots=True)
class BranchedTask:
    """The origin of a group of siblings, and its task."""

    task: str
    """The key of the task."""
    origin: Origin


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The sessions of a group: those that are finished, and those that it still needs."""

    finished: tuple[str, ...]
    """The ids of an earlier attempt's sessions."""
    jobs: tuple[Job, ...]
    """The sessions to run."""


def planned(
    run_id: str,
    tasks: Sequence[Task],
    size: int,
    finished: FinishedGroups | None = None,
    *,
    choose: Callable[[int], int] | None = None,
    settings: Callable[[int, Origin | None], Mapping[str, Any]] = lambda _number, _origin: {},
    branch: Callable[[int], BranchedTask | None] = lambda _number: None,
) -> Callable[[int], GroupPlan]:
    """Return a function from a group's number to its plan: a task, run by ``size`` sessions.

    ``choose`` returns the index of a group's task; without it, tasks are taken in turn. A group
    that an earlier attempt has begun keeps its task, and its origin. ``settings`` returns those of
    a group's sessions, from its number and its origin. ``branch`` returns the task and the origin
    of a group of siblings.
    """
    earlier = finished or FinishedGroups()
    places = {key_of(task): place for place, task in enumerate(tasks)}

    def plan(number: int) -> GroupPlan:
        place, origin = places.get(earlier.tasks.get(number, "")), earlier.origins.get(number)
        if place is None and (branched := branch(number)) is not None:
            place, origin = places.get(branched.task), branched.origin
        if place is None:
            origin = None
            place = number % len(tasks) if choose is None else choose(number)
        done = tuple(earlier.sessions.get(number, ())[:size])
        own = {} if origin is None else {"replay": {"on_divergence": "live"}}
        job = Job(
            tasks[place], group_id(run_id, number), {**settings(number, origin), **own}, origin
        )
        return GroupPlan(done, (job,) * (size - len(done)))

    return plan


def key_of(task: Task) -> str:
    """Return the key of a task, as :func:`bridle.reconstruct.evaluation.task_key` makes it."""
    return f"{task.suite}/{task.split}/{task.id}"
