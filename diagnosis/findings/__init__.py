"""Diagnoses from the record, each with its evidence and a remedy.

Examples are why nothing trains, why a conversation became several rows or why a run is slow.
:func:`findings` is a pure function of :class:`bridle.diagnosis.facts.Facts`. Causes come before
their consequences: a call without token ids has no trainable token, whatever else is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bridle.diagnosis.facts import Facts, read_facts
from bridle.diagnosis.findings import recording, training
from bridle.diagnosis.findings.collapse import CollapseWatch, collapses_of
from bridle.diagnosis.findings.finding import Finding, Severity
from bridle.reconstruct.rewards import CountedRewards
from bridle.store.reading.queries import Reader
from bridle.store.records import IMPORTED

__all__ = [
    "CollapseWatch",
    "Finding",
    "Severity",
    "findings",
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
    training.scoring,
    training.stale,
    training.no_groups,
    training.equal_rewards,
    training.nothing_trained,
    recording.unlinked_roots,
    recording.template_rewrites,
    training.unusual_rate,
    training.growing_gap,
    training.slow,
)
"""Checks in the order of their findings: causes come before their consequences."""


def findings(facts: Facts) -> list[Finding]:
    """Return all problems that the record shows, causes before their consequences."""
    checked = [found for check in _CHECKS if (found := check(facts)) is not None]
    return [*checked, *collapses_of(facts)]


def findings_of_session(reader: Reader, session_id: str) -> list[Finding]:
    """Return the findings of a session.

    Raise :class:`bridle.store.errors.NotFound` if there is none.
    """
    record = reader.session(session_id)
    found = findings(read_facts(reader, CountedRewards(reader).number, session=session_id))
    if IMPORTED in record.labels:  # the file had none, and nothing can be done about it
        return [finding for finding in found if finding.name != "no_token_ids"]
    return found


def findings_of_run(reader: Reader, run_id: str, most: int | None = None) -> list[Finding]:
    """Return the findings of a run, or of its newest sessions, about ``most``.

    Raise :class:`bridle.store.errors.NotFound` if there is none.
    """
    run, number = reader.run(run_id), CountedRewards(reader).number
    return findings(read_facts(reader, number, run=run, most=most))
