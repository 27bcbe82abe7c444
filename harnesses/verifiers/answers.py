"""Verifiers that compare the agent's answer with the task's."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from bridle.harnesses.verifiers.delivery import (
    REWARD,
    Delivery,
    Scores,
    TaskUnfit,
    Verdict,
    expected,
)
from bridle.harnesses.verifiers.function import FunctionVerifier
from bridle.harnesses.verifiers.separate import SeparateFunction


@dataclass(frozen=True, slots=True)
class ExactAnswer:
    """A verifier that gives 1.0 if the answer equals ``payload[key]``.

    Surrounding space and letter case do not matter.
    """

    key: str = "answer"

    async def __call__(self, delivery: Delivery) -> Scores:
        wanted = str(expected(delivery.task, self.key))
        return {REWARD: float(_folded(delivery.answer) == _folded(wanted))}


@dataclass(frozen=True, slots=True)
class NumberAnswer:
    """A verifier that gives 1.0 if the answer's only number equals ``payload[key]``.

    An answer that lists several numbers is wrong, so naming them all does not pay. Thousands
    separators (``1,250``) and a trailing ``.0`` do not matter.
    """

    key: str = "answer"
    tolerance: float = 1e-9

    async def __call__(self, delivery: Delivery) -> Scores:
        stated = expected(delivery.task, self.key)
        try:
            wanted = float(stated)
        except (TypeError, ValueError) as error:
            raise TaskUnfit(f"the task's {self.key} is {stated!r}, no number") from error
        numbers = numbers_in(delivery.answer)
        right = len(numbers) == 1 and abs(numbers[0] - wanted) <= self.tolerance
        return {REWARD: float(right)}


@dataclass(frozen=True, slots=True)
class RegexAnswer:
    """A verifier that gives 1.0 if a pattern matches in the answer.

    The pattern is ``pattern`` or else ``payload["pattern"]``.
    """

    pattern: str | None = None

    async def __call__(self, delivery: Delivery) -> Verdict:
        pattern = self.pattern or str(expected(delivery.task, "pattern"))
        try:
            re.compile(pattern)
        except re.error as error:
            raise TaskUnfit(f"the task's pattern is {pattern!r}: {error}") from error
        task = replace(delivery.task, payload={"pattern": pattern})
        return await _MATCHING(replace(delivery, task=task))


def matches(delivery: Delivery) -> float:
    """Return 1.0 if ``payload["pattern"]`` matches in the answer, and else 0.0."""
    return float(re.search(delivery.task.payload["pattern"], delivery.answer) is not None)


_MATCHING: Final = SeparateFunction(f"{__name__}:{matches.__name__}", {}, FunctionVerifier(matches))
"""A match may take years for an answer that the agent made for it, and no thread can stop it."""


_MINUS = "\N{MINUS SIGN}"
_NUMBER = re.compile(
    rf"[-{_MINUS}]?(?:\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\w.])\.\d+)"
)


def numbers_in(text: str) -> list[float]:
    """Return every number in ``text``, in order."""
    found = (number.replace(",", "").replace(_MINUS, "-") for number in _NUMBER.findall(text))
    return [float(number) for number in found]


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()
