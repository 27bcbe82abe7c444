"""One answer, and what the checks that give it have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bridle.store.reading.facts import Facts

MOST: Final = 0.5
"""From this share on what is wrong with calls or sessions explains the whole."""
SOME: Final = 0.1


class Severity(StrEnum):
    ERROR = "error"
    """Nothing, or nearly nothing, can be trained while it lasts."""
    WARNING = "warning"
    """Tokens or time are lost."""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer."""

    name: str
    """Stable snake_case word."""
    severity: Severity
    cause: str
    evidence: str
    remedy: str
    calls: tuple[str, ...] = ()
    """Some of the calls, or sessions, that it rests on."""


def share_of(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def listed(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{reason} ({number})" for reason, number in list(counts.items())[:3])


def summed(facts: Facts, name: str) -> float:
    """A number of the run summed over its steps."""
    return sum(metric.value for metric in facts.metrics.get(name, ()))
