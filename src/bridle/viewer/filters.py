"""The filter of a list of sessions, read from the query of a URL."""

from __future__ import annotations

import math
from dataclasses import fields
from datetime import UTC, date, datetime, time
from typing import Annotated, Any, Final

from fastapi import Depends, Query, Request
from fastapi.exceptions import RequestValidationError

from bridle.store.reading.session_filter import SessionFilter

LARGEST: Final = 2**53
"""The largest number that is compared with a version in the store."""
LONGEST: Final = 512
"""Maximum number of characters of a text in a query."""
_DAY: Final = 86_400.0
Text = Annotated[str | None, Query(max_length=LONGEST)]


_NAMES: Final = (
    *("run", "task", "group", "harness", "outcome", "reward", "broke", "kind", "status"),
    *("fate", "reason", "text", "model"),
)
"""The conditions that are texts."""


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _day(value: str | None) -> float | None:
    """Return the time at which a day such as ``2026-11-27`` begins (UTC), or ``None``."""
    try:
        return datetime.combine(date.fromisoformat(value or ""), time(), UTC).timestamp()
    except ValueError:
        return None


def session_filter(request: Request) -> SessionFilter:
    """Return the filter of a request's query.

    A field sets no condition if it is empty, or is not a number where one is needed. Raise
    ``RequestValidationError`` for a text that is too long.
    """
    query = request.query_params
    for name, value in query.items():
        if len(value) > LONGEST:
            problem = {"loc": ("query", name), "msg": f"has more than {LONGEST} characters"}
            raise RequestValidationError([problem])
    whole = _number(query.get("version"))
    if whole is not None and abs(whole) > LARGEST:
        whole = None
    texts: dict[str, Any] = {name: query.get(name) or None for name in _NAMES}
    until = _day(query.get("until"))
    return SessionFilter(
        **texts,
        sessions=request.state.source.only,
        since=_day(query.get("since")),
        until=None if until is None else until + _DAY,
        least=_number(query.get("least")),
        most=_number(query.get("most")),
        sampled_least=_number(query.get("sampled_least")),
        sampled_most=_number(query.get("sampled_most")),
        version=None if whole is None else int(whole),
    )


Filter = Annotated[SessionFilter, Depends(session_filter)]


def filled(wanted: SessionFilter) -> dict[str, Any]:
    """Return the conditions of a filter that are set, for links."""
    values = {one.name: getattr(wanted, one.name) for one in fields(wanted)}
    del values["sessions"]
    for name, less in (("since", 0.0), ("until", _DAY)):
        if values[name] is not None:
            values[name] = datetime.fromtimestamp(values[name] - less, UTC).date().isoformat()
    return {name: value for name, value in values.items() if value is not None}
