"""Evaluation of agents on tasks: pass@k, mean@k and their intervals, from recorded rewards.

A task's pass@k is the unbiased estimate of Chen et al. (2021, arXiv 2107.03374): if ``c`` of ``n``
attempts succeeded, it is ``1 - C(n - c, k) / C(n, k)``. Figures are means over tasks. Intervals are
95% intervals over tasks, because a new measurement would draw other tasks. Wilson's interval (1927)
is used if every value lies between 0 and 1; for such values it is too wide rather than too narrow.
Otherwise the normal interval is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, NamedTuple

from bridle.reconstruct.rewards import Aggregation, CountedRewards
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord
from bridle.store.reward import Reward

By = Literal["harness", "task", "version"]
QUARANTINED: Final = "quarantined"
MEASURED: Final = frozenset({"completed", "agent_error", "timeout", QUARANTINED})
"""Outcomes that count as attempts. A quarantined session is a failed attempt: if it were left out,
an agent that cheats where it fails would pass more often."""
_Z: Final = 1.96


@dataclass(frozen=True, slots=True)
class Attempt:
    """One session on one task."""

    task: str
    reward: float
    harness: str | None = None
    version: int | None = None
    """Policy version of its last call; ``None`` when it made none."""
    success: float | None = None
    """The value by which the attempt is judged as passed; ``None`` stands for its reward."""

    @property
    def judged_by(self) -> float:
        return self.reward if self.success is None else self.success


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and the ends of its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}–{self.high:.3f})"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of some attempts."""

    tasks: int
    attempts: int
    pass_at: Mapping[int, Estimate]
    """Estimates by ``k``, for each ``k`` for which every task has enough attempts."""
    mean_at: tuple[int, Estimate]
    """The smallest number ``k`` of attempts of any task, and the mean reward over the first ``k``
    attempts of each task."""

    def as_data(self) -> dict[str, Any]:
        k, mean = self.mean_at
        return {
            "tasks": self.tasks,
            "attempts": self.attempts,
            "pass_at": {str(k): asdict(value) for k, value in self.pass_at.items()},
            "mean_at": {str(k): asdict(mean)},
        }


def evaluated(
    attempts: Iterable[Attempt], ks: Sequence[int] = (1,), success: float = 1.0
) -> Evaluation:
    """Return the figures of ``attempts``.

    An attempt succeeds if its success, or else its reward, is at least ``success``.

    Raise ``ValueError`` if there are no attempts.
    """
    rewards: dict[str, list[float]] = {}
    passed: Counter[str] = Counter()
    for attempt in attempts:
        rewards.setdefault(attempt.task, []).append(attempt.reward)
        passed[attempt.task] += attempt.judged_by >= success
    if not rewards:
        raise ValueError("there is no attempt to evaluate")
    fewest = min(map(len, rewards.values()))
    means = [math.fsum(own[:fewest]) / fewest for own in rewards.values()]
    return Evaluation(
        tasks=len(rewards),
        attempts=sum(map(len, rewards.values())),
        pass_at={
            k: over_tasks([pass_at_k(len(own), passed[task], k) for task, own in rewards.items()])
            for k in ks
            if k <= fewest
        },
        mean_at=(fewest, over_tasks(means)),
    )


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """Return the probability that at least one of ``k`` attempts drawn from these has passed."""
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def over_tasks(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per task, with its interval.

    The order of the values does not change a bit of the result.
    """
    total = math.fsum(values)
    mean = total / len(values)
    if all(0 <= value <= 1 for value in values):
        low, high = wilson(total, len(values))
        return Estimate(mean, low, high)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    half = _Z * math.sqrt(variance / len(values)) if len(values) > 1 else math.inf
    return Estimate(mean, mean - half, mean + half)


def wilson(successes: float, trials: int, z: float = _Z) -> tuple[float, float]:
    """Return the interval of a share (Wilson, 1927), by default of 95%.

    It contains the share and lies within [0, 1]. Without a trial, it is all of that.
    """
    if not trials:
        return 0.0, 1.0
    share, spread = successes / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    # Of none or all, one end is the share itself but for rounding.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def split_by(attempts: Iterable[Attempt], by: By) -> dict[str, list[Attempt]]:
    """Group the attempts by harness, task or policy version.

    The keys are text, in the order of the values; ``–`` stands for a missing value.
    """
    key: Callable[[Attempt], Any] = {
        "harness": lambda one: one.harness,
        "task": lambda one: one.task,
        "version": lambda one: one.version,
    }[by]
    found: dict[Any, list[Attempt]] = {}
    for attempt in attempts:
        found.setdefault(key(attempt), []).append(attempt)
    ordered = sorted(found.items(), key=lambda item: (item[0] is not None, item[0] or 0))
    return {"–" if name is None else str(name): own for name, own in ordered}


def task_key(session: SessionRecord) -> str:
    """Return a session's task as text."""
    return f"{session.task_suite}/{session.task_split}/{session.task_id}"


class Judged(NamedTuple):
    """The numbers of one attempt."""

    reward: float
    success: float
    """The value by which it is judged as passed."""


def judged(
    outcome: str | None, rewards: Sequence[Reward], aggregation: Aggregation
) -> Judged | None:
    """Return the numbers of one attempt, or ``None``.

    The result is ``None`` if the attempt has neither a reward nor a success, or if its outcome is
    not in ``MEASURED``. An attempt without a reward of its own has its success in its place, or the
    sum of the rewards of its parts. The numbers of a quarantined session are at most 0.
    """
    if outcome not in MEASURED:
        return None
    numbers, success = aggregation.numbers(rewards), aggregation.success(rewards)
    given = [one for one in (numbers.value, success, numbers.episode) if one is not None]
    if not given:
        return None
    most = 0.0 if outcome == QUARANTINED else math.inf
    return Judged(min(most, given[0]), min(most, given[0] if success is None else success))


def attempts_of(
    reader: Reader,
    *,
    run: str | None = None,
    where: str | None = None,
    sources: Sequence[str] | None = None,
    wanted: Callable[[SessionRecord], bool] = lambda _session: True,
    notice: Callable[[Aggregation, Sequence[Reward]], None] = lambda _rule, _rewards: None,
) -> list[Attempt]:
    """Return the recorded attempts.

    They are sealed sessions on a task, with a reward and a measured outcome. A session's reward is
    its number by the rules of its run; ``sources`` replace the run's sources. ``notice`` is called
    with the rule and the rewards of each attempt.
    """
    counted = CountedRewards(reader, sources)
    sessions = [
        session
        for session in reader.sessions(run=run, where=where, sealed=True)
        if session.task_id is not None and session.outcome in MEASURED and wanted(session)
    ]
    ids = [session.id for session in sessions]
    rewards, versions = reader.rewards_of(ids), reader.versions_of(ids)
    attempts = []
    for session in sessions:
        rule = counted.aggregation(session.run_id)
        numbers = judged(session.outcome, rewards[session.id], rule)
        if numbers is not None:
            notice(rule, rewards[session.id])
            place = (session.harness, versions.get(session.id))
            attempts.append(Attempt(task_key(session), numbers.reward, *place, numbers.success))
    return attempts
