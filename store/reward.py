"""A reward: one named number about a session, or about one call of it, and its kind.

A *score* counts towards the numbers that training, evaluation, exports and pages use. A *finding*
reports something that happened, such as a look at the git history; its value is never summed and
never exported as a reward. Only its mode has an effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from bridle.store.declaration import SHORT_TEXT, Fact


class RewardSource(StrEnum):
    """The authority under which a reward was recorded.

    The server assigns it; a client cannot claim one.
    """

    VERIFIER = "verifier"
    """The session's verifier key, which the code that scores a run's sessions uses."""
    OPERATOR = "operator"
    """The admin key, or a person who writes to the store itself (``bridle reward``)."""


class RewardKind(StrEnum):
    """The use of a reward."""

    SCORE = "score"
    """A number that counts."""
    FINDING = "finding"
    """A report about the session; its value counts occurrences and is never added to anything."""


class FindingMode(StrEnum):
    """The effect of a finding on its session."""

    WARN = "warn"
    """The finding is only shown."""
    ZERO = "zero"
    """No number of the session is above 0."""
    QUARANTINE = "quarantine"
    """No number of the session is above 0, and the session is not trained on."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A named reward of a session, or of one call or turn in it.

    It may arrive at any later time.
    """

    session_id: Annotated[str, Fact("The session's id", size=64, references="sessions.id")]
    name: Annotated[str, Fact("The name of the reward", size=SHORT_TEXT)]
    value: Annotated[float, Fact("The number; a finding's is the number of times it was seen")]
    created_at: Annotated[float, Fact("The time at which the reward was given", time=True)]
    call_id: Annotated[
        str | None, Fact("The id of the call, if the reward is for one call alone", size=64)
    ] = None
    turn: Annotated[
        int | None,
        Fact("The number of the turn, counted from 1, if the reward is for one turn"),
    ] = None
    source: Annotated[
        RewardSource,
        Fact("The key that the reward was given with: `verifier` or `operator`", size=16),
    ] = RewardSource.OPERATOR
    kind: Annotated[
        RewardKind, Fact("`score`, a number that counts, or `finding`, a report", size=16)
    ] = RewardKind.SCORE
    mode: Annotated[
        FindingMode | None,
        Fact("The effect of a finding: `warn` unless given, `zero` or `quarantine`", size=16),
    ] = None
    """A score has none."""
    detail: Annotated[Mapping[str, Any], Fact("Whatever else the scorer reports")] = field(
        default_factory=dict
    )

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
        """Whether the reward is about the session, not about one call or turn."""
        return self.call_id is None and self.turn is None
