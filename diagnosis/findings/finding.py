"""The type of a finding, and functions that the checks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bridle.diagnosis.facts import Facts

MOST: Final = 0.5
"""The share from which on a problem with calls or sessions explains the whole."""
SOME: Final = 0.1


class Severity(StrEnum):
    ERROR = "error"
    """Nothing, or nearly nothing, can be trained while it lasts."""
    WARNING = "warning"
    """Tokens or time are lost."""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that the record shows, with its cause, evidence and remedy."""

    name: str
    """A stable snake_case word."""
    severity: Severity
    cause: str
    evidence: str
    remedy: str
    calls: tuple[str, ...] = ()
    """Ids of some of the calls, or sessions, that show it."""


def share_of(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def listed(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{reason} ({number})" for reason, number in list(counts.items())[:3])


def summed(facts: Facts, name: str) -> float:
    """Return the sum of a metric of the run over its steps."""
    return sum(metric.value for metric in facts.metrics.get(name, ()))
