"""Sums over the calls of sessions, as SQL: stored ones where there are any, else counted ones.

The stored sums are those of ``store/schema/derived.py``. A session without them, which still runs
or was sealed a moment ago, has its calls counted by the query. :func:`total_rows` and
:func:`count_rows` are both what the writer stores and what readers count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    Select,
    and_,
    case,
    exists,
    func,
    literal,
    or_,
    select,
    union_all,
)

from bridle.store.reading.call_conditions import NOTED, UNUSABLE, judged, kind_of
from bridle.store.records import CallKind
from bridle.store.schema.columns import seconds_between
from bridle.store.schema.derived import LONGEST_VALUE, NOTES, session_counts, session_totals
from bridle.store.schema.tables import calls, sessions, token_fates

_OF: Final = calls.c.session_id == sessions.c.id
OWN: Final = session_totals.c.session_id == sessions.c.id
"""The condition that joins a session with its stored sums."""
# Another name, because queries of sessions may join the stored sums themselves.
_sums: Final = session_totals.alias()
IS_SUMMED: Final = exists(select(_sums.c.calls).where(_sums.c.session_id == sessions.c.id))
"""True if a session has stored sums."""


_LISTED: Final = 500
"""Maximum sessions whose ids are read before their calls are counted."""


def few_listed(connection: Connection, ids: Select[Any]) -> Any:
    """Return the ids that a query selects as a list, or the query itself if they are many."""
    found = list(connection.execute(ids.limit(_LISTED + 1)).scalars())
    return found if len(found) <= _LISTED else ids


_COUNTED: Final = calls.c.kind != CallKind.COUNT
_WAIT: Final = seconds_between(calls.c.started_at, calls.c.first_token_at)
_REPLY: Final = seconds_between(calls.c.first_token_at, calls.c.ended_at)


def _number(value: Any) -> ColumnElement[Any]:
    """Return the number of the calls, without those that only count, that have a value."""
    return func.count(case((_COUNTED, value)))


def _sum(value: ColumnElement[Any]) -> ColumnElement[Any]:
    return func.coalesce(func.sum(case((_COUNTED, value))), 0)


served_or_asked: Final = func.coalesce(calls.c.model_served, calls.c.model_requested)
"""The model that served a call, or that it asked for."""
_TOTALS: Final[Mapping[str, ColumnElement[Any]]] = {
    "calls": func.count(calls.c.id),
    "prompt_tokens": func.sum(calls.c.prompt_tokens),
    "sampled_tokens": func.coalesce(func.sum(calls.c.sampled_tokens), 0),
    "version_start": func.min(calls.c.version_start),
    "version_end": func.max(calls.c.version_end),
    "started_at": func.min(calls.c.started_at),
    "ended_at": func.max(calls.c.ended_at),
    "failed": func.count(case((calls.c.status.in_(UNUSABLE), 1))),
    "breaks": func.count(calls.c.break_reason),
    "model": func.max(served_or_asked),
    "counted": _number(1),
    "continued": _number(calls.c.parent_call_id),
    "waits": _number(_WAIT),
    "waited_s": _sum(_WAIT),
    "replies": _number(_REPLY),
    "replied_s": _sum(_REPLY),
    **{f"noted_{name}": func.count(case((and_(_COUNTED, NOTED[name]), 1))) for name in NOTES},
}


def _total(name: str) -> ColumnElement[Any]:
    """Return a session's sum, in a query that outer-joins the stored sums by :data:`OWN`."""
    return _stored_or(session_totals.c[name], _TOTALS[name])


def _stored_or(stored: ColumnElement[Any], counted: Any) -> ColumnElement[Any]:
    live = select(counted).where(_OF).correlate(sessions).scalar_subquery()
    return case((session_totals.c.session_id.is_not(None), stored), else_=live)


CALLS: Final = _total("calls")
"""The number of a session's calls."""
BREAKS: Final = _total("breaks")
"""The number of a session's calls that broke."""
PROMPTED: Final = _total("prompt_tokens")
"""The number of prompt tokens of a session's calls; NULL if no engine counted any."""
TOKENS: Final = _total("sampled_tokens")
"""The number of tokens that a session sampled."""
SECONDS: Final = _stored_or(
    seconds_between(session_totals.c.started_at, session_totals.c.ended_at),
    seconds_between(_TOTALS["started_at"], _TOTALS["ended_at"]),
)
"""The seconds from a session's first call to the end of its last."""
OLDEST_VERSION: Final = _total("version_start")
"""The lowest policy version that sampled in a session."""


def counted(name: str, value: str | None = None) -> ColumnElement[bool]:
    """Return the condition that a session's stored counts have a value.

    ``name`` and ``value`` are those of ``session_counts``; ``None`` stands for any value.
    """
    query = select(session_counts.c.session_id).where(session_counts.c.name == name)
    if value is not None:
        query = query.where(session_counts.c.value == value)
    return sessions.c.id.in_(query)


def of_model(model: str) -> ColumnElement[bool]:
    """Return the condition that a call of a session has a model.

    The stored counts show the models of a session, if it was digested since they have them.
    """
    stored = session_counts.alias().c
    has_models = exists().where(stored.session_id == sessions.c.id, stored["name"] == "model")
    named = exists().where(_OF, served_or_asked == model)
    return or_(counted("model", model[:LONGEST_VALUE]), and_(~has_models, named))


def sampled_between(least: float | None, most: float | None) -> ColumnElement[bool]:
    """Return the condition that a session sampled so many tokens; ``None`` is no bound."""
    live = select(_TOTALS["sampled_tokens"]).where(_OF).correlate(sessions).scalar_subquery()
    summed = select(_sums.c.session_id).where(*_bounds(_sums.c.sampled_tokens, least, most))
    return or_(sessions.c.id.in_(summed), and_(~IS_SUMMED, *_bounds(live, least, most)))


def _bounds(value: Any, least: float | None, most: float | None) -> list[ColumnElement[bool]]:
    low = [] if least is None else [value >= least]
    return low if most is None else [*low, value <= most]


def in_versions(version: int) -> ColumnElement[bool]:
    """Return the condition that a version is in the stored range of a session.

    A session in the range need not have a call of that very version.
    """
    within = and_(_sums.c.version_start <= version, _sums.c.version_end >= version)
    query = select(_sums.c.session_id).where(within)
    return sessions.c.id.in_(query)


def trained_by(run: str, session_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition that a run has written an account of a session."""
    own = token_fates.c
    return exists().where(own.run_id == run, own.session_id == session_id)


def total_rows(chosen: ColumnElement[bool]) -> Select[Any]:
    """Return the query of the sums of sessions, as rows of ``session_totals``.

    ``chosen`` is a condition on the sessions. A session without calls has a row too.
    """
    named = (of.label(name) for name, of in _TOTALS.items())
    query = select(sessions.c.id.label("session_id"), *named).outerjoin_from(sessions, calls, _OF)
    return query.where(chosen).group_by(sessions.c.id)


_COUNTS: Final[Mapping[str, tuple[ColumnElement[Any], ColumnElement[bool]]]] = {
    "status": (calls.c.status, calls.c.status.is_not(None)),
    "kind": (kind_of(), calls.c.kind.is_not(None)),
    "break": (judged(calls.c.break_reason), calls.c.break_reason.is_not(None)),
    "model": (served_or_asked, served_or_asked.is_not(None)),
    "failure": (func.coalesce(calls.c.reason, "None"), and_(_COUNTED, NOTED["failed"])),
    "quarantine": (func.coalesce(calls.c.reason, "None"), and_(_COUNTED, NOTED["quarantined"])),
}
"""The values that are counted, by name, and the calls of which they are."""


def count_rows(
    chosen: ColumnElement[bool], names: Collection[str] = (*_COUNTS, "noted")
) -> CompoundSelect[Any]:
    """Return the query of the numbers of calls by facts, as rows of ``session_counts``.

    ``chosen`` is a condition on the calls, and ``names`` are those of the facts.
    """
    wanted = [(name, *_COUNTS[name]) for name in names if name != "noted"]
    if "noted" in names:
        wanted += [("noted", literal(of), and_(_COUNTED, NOTED[of])) for of in NOTED]
    return union_all(*(_counts(name, value, chosen, on) for name, value, on in wanted))


def _counts(name: str, value: Any, *conditions: ColumnElement[bool]) -> Select[Any]:
    cut = func.substr(value, 1, LONGEST_VALUE).label("value")
    found = select(calls.c.session_id, cut).where(*conditions).subquery().c
    query = select(found.session_id, literal(name).label("name"), found.value)
    counted = query.add_columns(func.count().label("number")).where(found.value.is_not(None))
    return counted.group_by(found.session_id, found.value)
