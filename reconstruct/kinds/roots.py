"""Roots: calls that continue no other call of their session."""

from __future__ import annotations

from collections.abc import Sequence

from bridle.reconstruct.repeats import REPETITIONS
from bridle.store.reading.call_conditions import WORKING
from bridle.store.reading.queries import CallRow


def unlinked_roots(calls: Sequence[CallRow]) -> list[CallRow]:
    """Return the roots that the kinds of one session's calls do not explain, in their order.

    ``calls`` have their kinds and notes (:class:`bridle.reconstruct.session.LoadedSession`). The
    work of a session has one root. Sub-agents, side calls, compactions and retries have roots of
    their own, and so has a question that was asked again. Any other root is a conversation of its
    own, or the next call of an agent whose history does not show which call it continues.
    """
    roots = [
        call
        for call in calls
        if call.parent_call_id is None
        and call.kind in WORKING
        and not any(note.name in REPETITIONS for note in call.notes)
    ]
    return roots[1:]
