"""The filter of a list of sessions, read from the query of a URL."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Annotated, Any, Final

from fastapi import Depends, Query

from bridle.store.reading.session_filter import SessionFilter

LARGEST: Final = 2**53
"""The largest number that is compared with a version in the store."""
Text = Annotated[str | None, Query(max_length=512)]


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def session_filter(
    run: Text = None,
    task: Text = None,
    group: Text = None,
    harness: Text = None,
    outcome: Text = None,
    reward: Text = None,
    least: Text = None,
    most: Text = None,
    version: Text = None,
    broke: Text = None,
    kind: Text = None,
    status: Text = None,
    fate: Text = None,
    reason: Text = None,
    text: Text = None,
) -> SessionFilter:
    """Return the filter of a query.

    A field sets no condition if it is empty, or is not a number where one is needed.
    """
    whole = _number(version)
    if whole is not None and abs(whole) > LARGEST:
        whole = None
    return SessionFilter(
        run=run or None,
        task=task or None,
        group=group or None,
        harness=harness or None,
        outcome=outcome or None,
        reward=reward or None,
        least=_number(least),
        most=_number(most),
        version=None if whole is None else int(whole),
        broke=broke or None,
        kind=kind or None,
        status=status or None,
        fate=fate or None,
        reason=reason or None,
        text=text or None,
    )


Filter = Annotated[SessionFilter, Depends(session_filter)]


def filled(wanted: SessionFilter) -> dict[str, Any]:
    """Return the conditions of a filter that are set, for links."""
    values = {field.name: getattr(wanted, field.name) for field in fields(wanted)}
    return {name: value for name, value in values.items() if value is not None}
