"""Which sessions and calls an export takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from reconstruct.policy import DEFAULT_POLICY, TrainablePolicy
from reconstruct.rewards import session_rewards
from store.queries import Reader
from store.records import SessionRecord


@dataclass(frozen=True, slots=True)
class Selection:
    """Every condition must hold; ``None`` means any."""

    run: str | None = None
    group: str | None = None
    task: str | None = None
    harness: str | None = None
    split: str | None = None
    """Of the session's task."""
    outcome: str | None = None
    since: float | None = None
    until: float | None = None
    limit: int | None = None
    """Sessions looked at, before rewards are compared."""
    reward: str = "reward"
    """The name that the two bounds look at."""
    min_reward: float | None = None
    max_reward: float | None = None
    policy: TrainablePolicy = DEFAULT_POLICY
    """Which calls: by kind, status, model and policy version."""


@dataclass(slots=True)
class ExportReport:
    """What an export wrote, and what it left out."""

    path: Path
    sessions: int = 0
    rows: int = 0
    tokens: int = 0
    """Trained tokens; 0 in formats without tokens."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Sessions and calls by reason."""

    def leave_out(self, reason: str, count: int = 1) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + count


def select(
    reader: Reader, selection: Selection, report: ExportReport
) -> Iterator[tuple[SessionRecord, dict[str, float]]]:
    """The sessions to export, each with its rewards by name."""
    bounded = selection.min_reward is not None or selection.max_reward is not None
    found = reader.sessions(
        run=selection.run,
        group=selection.group,
        task=selection.task,
        harness=selection.harness,
        split=selection.split,
        outcome=selection.outcome,
        since=selection.since,
        until=selection.until,
        limit=selection.limit,
    )
    for session in found:
        rewards = session_rewards(reader.rewards(session.id))
        value = rewards.get(selection.reward)
        if bounded and value is None:
            report.leave_out("session_without_reward")
        elif value is not None and not _within(value, selection):
            report.leave_out("session_reward_out_of_bounds")
        else:
            report.sessions += 1
            yield session, rewards


def _within(value: float, selection: Selection) -> bool:
    above = selection.min_reward is None or value >= selection.min_reward
    below = selection.max_reward is None or value <= selection.max_reward
    return above and below
