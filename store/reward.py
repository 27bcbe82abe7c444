"""A reward: one named number with a place, a source and a kind.

The place is where the reward was earned: the session as a whole, a role, a branch, a call, or a
turn, which is a call by its number.

A *score* counts towards the numbers that training, evaluation, exports and pages use. A *success*
is the value by which an evaluation judges a session as passed; it counts in no other number. A
*finding* reports something that happened, such as a look at the git history; its value is never
summed and never exported as a reward. Only its mode has an effect.
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
    SCORER = "scorer"
    """The same key, for a scorer that the run names beside its verifier. Such a reward counts only
    where a run names it or this source."""
    OPERATOR = "operator"
    """The admin key, or a person who writes to the store itself (``bridle reward``)."""


class RewardKind(StrEnum):
    """The use of a reward."""

    SCORE = "score"
    """A number that counts."""
    SUCCESS = "success"
    """The value by which an evaluation judges the session; it counts in no other number."""
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
    """A named reward of a session, or of one role, branch, call or turn in it.

    It may arrive at any later time. Raise ``ValueError`` for a value that is not finite, for a
    score with a mode, and for more than one place.
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
        Fact("The authority of the reward: `verifier`, `scorer` or `operator`", size=16),
    ] = RewardSource.OPERATOR
    kind: Annotated[
        RewardKind,
        Fact(
            "`score`, a number that counts; `success`, which evaluations read; or `finding`, a "
            "report",
            size=16,
        ),
    ] = RewardKind.SCORE
    mode: Annotated[
        FindingMode | None,
        Fact("The effect of a finding: `warn` unless given, `zero` or `quarantine`", size=16),
    ] = None
    """A score has none."""
    detail: Annotated[Mapping[str, Any], Fact("Whatever else the scorer reports")] = field(
        default_factory=dict
    )
    role: Annotated[
        str | None,
        Fact("The role, if the reward is for the calls of one role", size=SHORT_TEXT),
    ] = None
    branch: Annotated[
        str | None,
        Fact("The id of the call that ends the branch, if the reward is for one branch", size=64),
    ] = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"reward {self.name} must be a finite number, not {self.value}")
        at_call = self.call_id is not None or self.turn is not None
        if at_call + (self.role is not None) + (self.branch is not None) > 1:
            raise ValueError(
                f"reward {self.name} has several places: give it to a role, to a branch, or to a "
                "call or turn"
            )
        if self.kind is RewardKind.FINDING:
            if self.mode is None:
                object.__setattr__(self, "mode", FindingMode.WARN)
        elif self.mode is not None:
            raise ValueError(f"reward {self.name} is a {self.kind}: only a finding has a mode")

    @property
    def is_finding(self) -> bool:
        return self.kind is RewardKind.FINDING

    @property
    def is_score(self) -> bool:
        return self.kind is RewardKind.SCORE

    @property
    def whole(self) -> bool:
        """Return whether the reward is about the session, not about a part of it."""
        return self.place == (None, None, None)

    @property
    def place(self) -> tuple[str | None, str | None, str | int | None]:
        """The role, the branch, and the call or else the turn, each ``None`` without one.

        The latest of several rewards with one name and place counts.
        """
        at_call = self.turn if self.call_id is None else self.call_id
        return self.role, self.branch, at_call
