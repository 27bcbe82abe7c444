"""A reward: one named number about a session, or about one call of it, and what kind it is.

A *score* counts towards the numbers that training, evaluation, exports and pages use. A *finding*
reports something that happened, such as a look at the git history; its value is never summed and
never exported as a reward. It acts through its mode alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class RewardSource(StrEnum):
    """Whose right a reward was recorded by. The server assigns it; no client can claim one."""

    VERIFIER = "verifier"
    """The session's verifier key: the code that a run scores its sessions by."""
    OPERATOR = "operator"
    """The admin key, or someone who writes to the store itself (``bridle reward``)."""
    UNATTESTED = "unattested"
    """Recorded by a release in which a session's own key could write rewards."""


class RewardKind(StrEnum):
    """How a reward is used."""

    SCORE = "score"
    """A number that counts."""
    FINDING = "finding"
    """A report about the session; its value counts occurrences and is never added to anything."""


class FindingMode(StrEnum):
    """The effect of a finding on its session."""

    WARN = "warn"
    """None: it is shown."""
    ZERO = "zero"
    """No number of the session is above 0."""
    QUARANTINE = "quarantine"
    """No number of the session is above 0, and it is not trained on."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A named score of a session, or of one call or turn in it. Late ones are welcome."""

    session_id: str
    name: str
    value: float
    created_at: float
    call_id: str | None = None
    turn: int | None = None
    source: RewardSource = RewardSource.OPERATOR
    kind: RewardKind = RewardKind.SCORE
    mode: FindingMode | None = None
    """Of a finding; ``warn`` where none is given. A score has none."""
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"reward {self.name} must be a finite number, not {self.value}")
        if self.kind is RewardKind.FINDING:
            if self.mode is None:
                object.__setattr__(self, "mode", FindingMode.WARN)
        elif self.mode is not None:
            raise ValueError(f"reward {self.name} is a score: only a finding has a mode")

    @property
    def is_finding(self) -> bool:
        return self.kind is RewardKind.FINDING

    @property
    def whole(self) -> bool:
        """Whether it is about the session, not about one call or turn."""
        return self.call_id is None and self.turn is None
