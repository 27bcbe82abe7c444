"""Filters by any column: ``harness=codex``, ``call.dialect!=chat``, ``reward.tests>=0.5``.

A bare name is a column of the session. ``task.NAME``, ``call.NAME``, ``label.NAME`` and
``reward.NAME`` look at its task (then into the task's payload), its calls, its labels and its
rewards. A condition on calls decides which calls are trained; the others decide which sessions are
taken.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bridle.errors import UsageError
from bridle.store.reading.queries import CallRow
from bridle.store.reading.session_filter import OPEN
from bridle.store.records import SessionRecord, TaskRecord

_FORM: Final = re.compile(r"\s*([A-Za-z_][\w.:-]*?)\s*(!=|>=|<=|==?|>|<)\s*(.*?)\s*", re.DOTALL)
_ORDER: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_COLUMNS: Final[Mapping[str, frozenset[str]]] = {
    "session": frozenset(f.name for f in dataclasses.fields(SessionRecord))
    - {"key_hash", "verifier_key_hash"},
    "call": frozenset(f.name for f in dataclasses.fields(CallRow)),
}


class BadCondition(UsageError, ValueError):
    """A condition that cannot be parsed. The message states what is expected."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison ``of.name operator value``. A missing value meets only ``!=`` and ``=null``."""

    of: str
    """``session``, ``task``, ``call``, ``label`` or ``reward``."""
    name: str
    operator: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse the text of a condition.

        Raise :class:`BadCondition` if its form or column is unknown.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise BadCondition(f"{text!r} is no condition: write NAME=VALUE, or !=, >=, <=, >, <")
        name, sign, value = found.groups()
        sign = "=" if sign == "==" else sign
        of, dot, rest = name.partition(".")
        if not dot:
            of, rest = "session", name
        if of not in ("session", "task", "call", "label", "reward") or not rest:
            raise BadCondition(f"{name!r}: there are task., call., label. and reward. columns")
        if of in _COLUMNS and rest not in _COLUMNS[of]:
            known = ", ".join(sorted(_COLUMNS[of]))
            raise BadCondition(f"a {of} has no column {rest!r}; there are {known}")
        if sign in _ORDER and _number(value) is None:
            raise BadCondition(f"{text!r} needs a number")
        if (of, rest, value) == ("session", "outcome", OPEN):
            value = "null"
        return cls(of, rest, sign, value)

    def holds(self, actual: Any) -> bool:
        """Return whether a value meets the condition."""
        if self.operator in _ORDER:
            wanted = _number(self.value)
            if isinstance(actual, bool) or not isinstance(actual, int | float) or wanted is None:
                return False
            return _ORDER[self.operator](actual, wanted)
        return self._equals(actual) == (self.operator == "=")

    def _equals(self, actual: Any) -> bool:
        if actual is None:
            return self.value == "null"
        if isinstance(actual, bool):
            return self.value == str(actual).lower()
        if isinstance(actual, int | float):
            return _number(self.value) == actual
        return str(actual) == self.value

    def __str__(self) -> str:
        name = self.name if self.of == "session" else f"{self.of}.{self.name}"
        return f"{name}{self.operator}{self.value}"


def session_meets(
    conditions: tuple[Condition, ...],
    session: SessionRecord,
    task: TaskRecord | None,
    rewards: Mapping[str, float],
) -> bool:
    """Return whether a session meets every condition that is not on calls."""
    return all(
        condition.holds(_value(condition, session, task, rewards))
        for condition in conditions
        if condition.of != "call"
    )


def call_meets(conditions: tuple[Condition, ...], call: CallRow) -> bool:
    """Return whether a call meets every condition on calls."""
    return all(c.holds(getattr(call, c.name)) for c in conditions if c.of == "call")


def _value(
    condition: Condition,
    session: SessionRecord,
    task: TaskRecord | None,
    rewards: Mapping[str, float],
) -> Any:
    match condition.of:
        case "session":
            return getattr(session, condition.name)
        case "label":
            return session.labels.get(condition.name)
        case "reward":
            return rewards.get(condition.name)
    if task is None:
        return None
    if condition.name in ("id", "suite", "split", "created_at"):
        return getattr(task, condition.name)
    return task.payload.get(condition.name)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
