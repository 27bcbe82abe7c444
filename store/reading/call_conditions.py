"""Conditions on calls, as SQL, and their verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Column, ColumnElement, func, select

from bridle.store.reading.damage import json_value
from bridle.store.records import CallKind, CallStatus
from bridle.store.schema.tables import call_kinds, calls

UNUSABLE: Final = (CallStatus.FAILED, CallStatus.QUARANTINED, CallStatus.INTERRUPTED)
"""The statuses of calls without a usable reply."""
WORKING: Final = (CallKind.MAIN, CallKind.UNKNOWN)
"""The kinds of calls that do the work of a session, for all that is known."""
_COMPLETE: Final = (calls.c.status == CallStatus.COMPLETE) & calls.c.replayed_call_id.is_(None)
"""The complete calls, without those that have a reply of another session's record."""


def judged(column: Column[Any]) -> ColumnElement[Any]:
    """Return a column of ``calls`` as it was judged from the record.

    The column is ``kind`` or ``break_reason``. It is as recorded if the call has not been judged.
    """
    verdict = select(call_kinds.c[column.name]).where(call_kinds.c.call_id == calls.c.id)
    return func.coalesce(verdict.scalar_subquery(), column)


def kind_of() -> ColumnElement[Any]:
    """Return the kind of a call: as a person decided it, else as it was judged."""
    return func.coalesce(calls.c.kind_set, judged(calls.c.kind))


NOTED: Final[Mapping[str, ColumnElement[bool]]] = {
    "complete": _COMPLETE,
    "failed": calls.c.status.in_([CallStatus.FAILED, CallStatus.INTERRUPTED]),
    "quarantined": calls.c.status == CallStatus.QUARANTINED,
    "without_ids": _COMPLETE
    & (func.coalesce(calls.c.sampled_tokens, 0) == 0)
    & calls.c.request_messages.is_not(None),
    "length": _COMPLETE & (calls.c.finish_reason == "length"),
    "greedy": _COMPLETE & (json_value(calls.c.sampling, "temperature").as_float() == 0),
    "broken": calls.c.break_reason.is_not(None),
    "root": calls.c.parent_call_id.is_(None) & kind_of().in_(WORKING),
}
"""Conditions on calls that findings count."""
