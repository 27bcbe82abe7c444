"""Why nothing trains, why a conversation became several rows, why a run is slow: answers from the
record, each with its evidence and a remedy.

:func:`findings` is a pure function of :class:`bridle.store.reading.facts.Facts`. What causes the
others comes first: a call without token ids has no trainable token, whatever else is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bridle.reconstruct.findings import recording, training
from bridle.reconstruct.findings.finding import Finding, Severity
from bridle.reconstruct.rewards import CountedRewards
from bridle.store.errors import NotFound
from bridle.store.reading.facts import Facts, read_facts
from bridle.store.reading.queries import Reader

__all__ = [
    "Finding",
    "Severity",
    "findings",
    "findings_of",
    "findings_of_run",
    "findings_of_session",
]

_CHECKS: Final[tuple[Callable[[Facts], Finding | None], ...]] = (
    recording.no_calls,
    recording.calls_failed,
    recording.no_token_ids,
    recording.quarantined,
    training.other_weights,
    recording.greedy,
    recording.truncated,
    training.no_reward,
    training.guarded,
    training.stale,
    training.no_groups,
    training.equal_rewards,
    training.nothing_trained,
    recording.template_rewrites,
    training.growing_gap,
    training.slow,
)
"""Causes before what they cause."""


def findings(facts: Facts) -> list[Finding]:
    """All that the record shows to be wrong, causes before what they cause."""
    return [found for check in _CHECKS if (found := check(facts)) is not None]


def findings_of_session(reader: Reader, session_id: str) -> list[Finding]:
    """Raises :class:`bridle.store.errors.NotFound`."""
    reader.session(session_id)
    return findings(read_facts(reader, CountedRewards(reader).number, session=session_id))


def findings_of_run(reader: Reader, run_id: str) -> list[Finding]:
    """Raises :class:`bridle.store.errors.NotFound`."""
    return findings(read_facts(reader, CountedRewards(reader).number, run=reader.run(run_id)))


def findings_of(reader: Reader, name: str) -> list[Finding]:
    """Of the session or the run with this id.

    Raises :class:`bridle.store.errors.NotFound` when there is neither.
    """
    try:
        return findings_of_run(reader, name)
    except NotFound:
        return findings_of_session(reader, name)
