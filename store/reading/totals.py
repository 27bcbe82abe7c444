"""Sums over the calls of sessions, as SQL: stored ones where there are any, else counted ones.

The stored sums are those of ``store/schema/derived.py``. A session without them, which still runs
or was sealed a moment ago, has its calls counted by the query.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import ColumnElement, and_, case, exists, false, func, select

from bridle.store.schema.columns import seconds_between
from bridle.store.schema.derived import session_counts, session_fates, session_totals
from bridle.store.schema.tables import calls, sessions, token_fates

_OF: Final = calls.c.session_id == sessions.c.id
OWN: Final = session_totals.c.session_id == sessions.c.id
"""The condition that joins a session with its stored sums."""
# Another name, because queries of sessions may join the stored sums themselves.
_sums: Final = session_totals.alias()
IS_SUMMED: Final = exists(select(_sums.c.calls).where(_sums.c.session_id == sessions.c.id))
"""Whether a session has stored sums."""


def _total(column: ColumnElement[Any], counted: Any) -> ColumnElement[Any]:
    """Return a session's sum, in a query that outer-joins the stored sums by :data:`OWN`."""
    live = select(counted).where(_OF).correlate(sessions).scalar_subquery()
    return case((session_totals.c.session_id.is_not(None), column), else_=live)


CALLS: Final = _total(session_totals.c.calls, func.count())
"""The number of a session's calls."""
TOKENS: Final = _total(
    session_totals.c.sampled_tokens, func.coalesce(func.sum(calls.c.sampled_tokens), 0)
)
"""The number of tokens that a session sampled."""
SECONDS: Final = _total(
    seconds_between(session_totals.c.started_at, session_totals.c.ended_at),
    seconds_between(func.min(calls.c.started_at), func.max(calls.c.ended_at)),
)
"""The seconds from a session's first call to the end of its last."""
OLDEST_VERSION: Final = _total(session_totals.c.version_start, func.min(calls.c.version_start))
"""The lowest policy version that sampled in a session."""


def counted(name: str, value: str | None = None) -> ColumnElement[bool]:
    """Return the condition that a session's stored counts have a value.

    ``name`` and ``value`` are those of ``session_counts``; ``None`` stands for any value.
    """
    query = select(session_counts.c.session_id).where(session_counts.c.name == name)
    if value is not None:
        query = query.where(session_counts.c.value == value)
    return sessions.c.id.in_(query)


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


def is_of_another(run: str | None) -> ColumnElement[bool]:
    """Return whether the stored account of a session is that of a later run than ``run``."""
    if run is None:
        return false()
    own = session_fates.c
    other = exists().where(own.session_id == sessions.c.id, own.trained_by != run)
    return and_(other, trained_by(run, sessions.c.id))
