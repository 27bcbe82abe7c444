"""The turn that lost a session: the chance of success after each turn, from re-entries.

The value after turn ``t`` is the chance that a session succeeds which repeats the record up to
``t`` and then goes on live. A search re-enters at the beginning first. If the session ended worse
than it began, bisection finds two turns next to each other between which the value fell. The rest
of the budget goes where the interval is widest.

Intervals are Wilson's (1927, 95%), and those of a loss Newcombe's (1998, method 10).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bridle.errors import BridleError
from bridle.reconstruct.evaluation import wilson

BATCH: Final = 4
"""Re-entries at one turn at a time."""
LEAST_LOSS: Final = 0.3
"""The smallest loss of a turn that is named as the one that lost the session."""


class NotMeasured(BridleError):
    """No re-entry at a turn ended with a result."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A re-entry that is over."""

    session_id: str | None
    reward: float | None
    """Its reward, or ``None`` if it ended without one."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Value:
    """The chance of success after a turn."""

    successes: int
    samples: int
    known: bool = False
    """True if the number is no estimate: nothing is left to happen after the last turn."""

    @property
    def chance(self) -> float:
        return self.successes / self.samples if self.samples else 0.5

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the chance."""
        if self.known:
            return self.chance, self.chance
        return wilson(self.successes, self.samples)

    @property
    def width(self) -> float:
        low, high = self.interval
        return high - low


@dataclass(frozen=True, slots=True)
class Lost:
    """The turn that lost a session."""

    turn: int
    """Its number, from 1, among those of the search."""
    before: Value
    after: Value

    @property
    def loss(self) -> float:
        return self.before.chance - self.after.chance

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the loss."""
        return loss_interval(self.before, self.after)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of a search."""

    values: dict[int, Value]
    """The values that were measured, by the number of turns before them."""
    tried: dict[int, list[Tried]]
    """The re-entries behind each value."""
    lost: Lost | None
    """The turn that lost the session, or ``None`` if no turn certainly did."""

    @property
    def spent(self) -> int:
        """Number of re-entries."""
        return sum(map(len, self.tried.values()))


Enter = Callable[[int, int], Sequence[Tried]]
"""A function that re-enters after so many turns, so many times."""


def loss_interval(before: Value, after: Value) -> tuple[float, float]:
    (low, high), (after_low, after_high) = before.interval, after.interval
    loss = before.chance - after.chance
    down = math.hypot(before.chance - low, after_high - after.chance)
    up = math.hypot(high - before.chance, after.chance - after_low)
    return loss - down, loss + up


def explain(
    turns: int,
    succeeded: bool,
    enter: Enter,
    *,
    success: float = 1.0,
    per_turn: int = 8,
    budget: int | None = None,
) -> Explanation:
    """Search for the turn that lost a session of ``turns`` turns.

    ``succeeded`` is whether the recorded session did. A re-entry with a reward of ``success`` or
    more has succeeded. At most ``per_turn`` re-entries begin after one turn. With a ``budget``, no
    more are made in all, and what the search leaves goes where the interval is widest. Raise
    :class:`NotMeasured`.
    """
    search = _Search(turns, enter, success, per_turn, budget)
    search.values[turns] = Value(int(succeeded), 1, known=True)
    search.fill(0)
    lost = search.bisect(0, turns)
    if budget is not None:
        while (widest := search.widest()) is not None:
            search.more(widest)
    return Explanation(search.values, search.tried, lost)


@dataclass
class _Search:
    turns: int
    enter: Enter
    success: float
    per_turn: int
    budget: int | None
    values: dict[int, Value] = field(default_factory=dict)
    tried: dict[int, list[Tried]] = field(default_factory=dict)

    def bisect(self, low: int, high: int) -> Lost | None:
        """Return the turn that lost what lies between two values, if one certainly did."""
        if not self._is_lost(low, high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            between = (self.values[low].chance + self.values[high].chance) / 2
            above = self._is_above(middle, between)
            if middle not in self.values:
                return None
            low, high = (middle, high) if above else (low, middle)
        self.fill(low)
        self.fill(high)
        if not self._is_lost(low, high):
            return None
        return Lost(high, self.values[low], self.values[high])

    def _is_lost(self, low: int, high: int) -> bool:
        before, after = self.values[low], self.values[high]
        certain = loss_interval(before, after)[0] > 0
        return certain and before.chance - after.chance >= LEAST_LOSS

    def _is_above(self, turn: int, between: float) -> bool:
        """Return whether a value is above ``between``, as soon as its interval excludes that."""
        while self.more(turn):
            low, high = self.values[turn].interval
            if not low <= between <= high:
                break
        return self._value(turn).chance > between

    def fill(self, turn: int) -> None:
        """Make all re-entries after a turn that there may be."""
        while self.more(turn):
            pass

    def widest(self) -> int | None:
        """Return the turn with the widest interval, or ``None`` if no more can be measured."""
        able = [turn for turn in range(self.turns) if self._left(turn)]
        return max(able, key=lambda turn: self._value(turn).width, default=None)

    def more(self, turn: int) -> bool:
        """Make a batch of re-entries after a turn. Return whether there were any."""
        count = self._left(turn)
        if not count:
            return False
        new = self.enter(turn, count)
        all_tried = self.tried.setdefault(turn, [])
        all_tried += new
        rewards = [one.reward for one in all_tried if one.reward is not None]
        if not rewards:
            reasons = ", ".join({one.error or "no reward" for one in all_tried})
            raise NotMeasured(f"no re-entry after turn {turn} ended with a result: {reasons}")
        self.values[turn] = Value(sum(one >= self.success for one in rewards), len(rewards))
        return True

    def _value(self, turn: int) -> Value:
        return self.values.get(turn, Value(0, 0))

    def _left(self, turn: int) -> int:
        """Return the number of re-entries that may begin after a turn now."""
        if turn == self.turns:
            return 0
        left = self.per_turn - len(self.tried.get(turn, ()))
        if self.budget is not None:
            left = min(left, self.budget - sum(map(len, self.tried.values())))
        return max(0, min(left, BATCH))
