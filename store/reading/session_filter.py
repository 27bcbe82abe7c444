"""Conditions on sessions, as SQL: of pages, accounts, exports and counts of facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Select,
    and_,
    exists,
    literal_column,
    or_,
    select,
)

from bridle.store.reading.call_conditions import judged, kind_of
from bridle.store.reading.search import says
from bridle.store.reading.totals import (
    IS_SUMMED,
    counted,
    in_versions,
    of_model,
    sampled_between,
    trained_by,
)
from bridle.store.reward import RewardKind
from bridle.store.schema.accounts import account_rows, evaluation_of, ids_in_account
from bridle.store.schema.derived import session_fates
from bridle.store.schema.tables import calls, rewards, sessions

OPEN: Final = "open"
"""The outcome by which a condition names sessions that are not sealed; the store has none for
them."""
_OF: Final = calls.c.session_id == sessions.c.id


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Conditions on sessions, all of which must hold; ``None`` for no condition."""

    session: str | None = None
    """The session's id."""
    run: str | None = None
    task: str | None = None
    """The task's own id."""
    group: str | None = None
    origin: str | None = None
    """The recorded session that the session re-enters."""
    harness: str | None = None
    split: str | None = None
    """The split of the session's task."""
    outcome: str | None = None
    """The outcome; ``open`` for sessions that are not sealed."""
    reward: str | None = None
    """Name of a score that the session has."""
    least: float | None = None
    """Minimum value of that score, or of any score if none is named."""
    most: float | None = None
    version: int | None = None
    """A policy version that sampled in the session."""
    model: str | None = None
    """The model that a call in the session asked for or was served by."""
    sampled_least: float | None = None
    """Minimum number of tokens that the session sampled, which is what it cost."""
    sampled_most: float | None = None
    broke: str | None = None
    """The reason of a break in the session; ``any`` for every reason."""
    kind: str | None = None
    status: str | None = None
    """The status of a call in the session."""
    fate: str | None = None
    """A fate of tokens of the session in the store's account (``store/schema/accounts.py``):
    ``trained``, ``trainable``, ``masked`` or ``dropped``."""
    reason: str | None = None
    """The reason why these tokens were masked or dropped."""
    text: str | None = None
    """Words that follow each other in a text of the session, the last of them whole or its
    beginning (``store/reading/search.py``). Upper and lower case are the same."""
    sessions: Sequence[str] | None = None
    """Ids of sessions. Databases take some hundreds at once."""
    since: float | None = None
    """The earliest time of the session's creation."""
    until: float | None = None
    """The time before which the session was created."""
    sealed: bool | None = None
    anonymous: bool | None = None
    """Take only sessions with neither a name nor a key."""
    where: str | None = None
    """An SQL condition on the columns of ``sessions``. It is not escaped, so it must come from the
    owner of the store."""


def matching(wanted: SessionFilter, query: Select[Any], *, account: bool = False) -> Select[Any]:
    """Return ``query`` over sessions with the filter's conditions.

    With ``account``, the condition on a run includes the sessions of its evaluation, and others
    that it has trained on.
    """
    conditions = conditions_beside_run(wanted)
    if wanted.run is not None:
        whole = account or wanted.fate is not None
        own = sessions.c.run_id == wanted.run
        conditions.append(_in_account(wanted) if whole else own)
    return query.where(*conditions)


def _in_account(wanted: SessionFilter) -> ColumnElement[bool]:
    """Return the condition that a session belongs to the account of the filter's run.

    The sessions since a time are looked up one by one; else those of the account are.
    """
    run = str(wanted.run)
    if wanted.since is None:
        return sessions.c.id.in_(ids_in_account(run))
    own = sessions.c.run_id.in_([run, evaluation_of(run)])
    return or_(own, trained_by(run, sessions.c.id))


def conditions_beside_run(wanted: SessionFilter) -> list[ColumnElement[bool]]:
    """Return all conditions but that on the run."""
    return [
        *_own_conditions(wanted),
        *_call_conditions(wanted),
        *_reward_conditions(wanted),
        *_content_conditions(wanted),
    ]


def _own_conditions(wanted: SessionFilter) -> list[ColumnElement[bool]]:
    """Return the conditions on columns of the session, except that on its run."""
    own, is_open = sessions.c, wanted.outcome == OPEN
    equal = {
        own.id: wanted.session,
        own.task_id: wanted.task,
        own.group_id: wanted.group,
        own.origin_session_id: wanted.origin,
        own.harness: wanted.harness,
        own.task_split: wanted.split,
        own.outcome: None if is_open else wanted.outcome,
    }
    found = [column == value for column, value in equal.items() if value is not None]
    sealed = False if is_open else wanted.sealed
    if sealed is not None:
        found.append(own.sealed_at.is_not(None) if sealed else own.sealed_at.is_(None))
    if wanted.sessions is not None:
        found.append(own.id.in_(wanted.sessions))
    if wanted.since is not None:
        found.append(own.created_at >= wanted.since)
    if wanted.until is not None:
        found.append(own.created_at < wanted.until)
    if wanted.model is not None:
        found.append(of_model(wanted.model))
    if (wanted.sampled_least, wanted.sampled_most) != (None, None):
        found.append(sampled_between(wanted.sampled_least, wanted.sampled_most))
    if wanted.anonymous:
        found += own.name.is_(None), own.key_hash.is_(None)
    if wanted.where is not None:
        found.append(literal_column(f"({wanted.where})", Boolean()))
    return found


def _call_conditions(wanted: SessionFilter) -> list[ColumnElement[bool]]:
    """Return the conditions on the calls of the session.

    If there are several, one call must meet them all. The sums show which sessions have a call that
    meets each of them.
    """
    own: list[ColumnElement[bool]] = []
    summed: list[ColumnElement[bool]] = []
    if wanted.version is not None:
        own += calls.c.version_start <= wanted.version, calls.c.version_end >= wanted.version
        summed.append(in_versions(wanted.version))
    if wanted.broke == "any":
        own.append(calls.c.break_reason.is_not(None))
        summed.append(counted("break"))
    elif wanted.broke is not None:
        own.append(judged(calls.c.break_reason) == wanted.broke)
        summed.append(counted("break", wanted.broke))
    if wanted.status is not None:
        own.append(calls.c.status == wanted.status)
        summed.append(counted("status", wanted.status))
    if wanted.kind is not None:
        own.append(kind_of() == wanted.kind)
        summed.append(counted("kind", wanted.kind))
    if not own:
        return []
    # A scalar, because PostgreSQL would read all calls for an EXISTS, to look it up in them.
    first = select(calls.c.id).where(_OF, *own).limit(1).correlate(sessions).scalar_subquery()
    if len(summed) == 1 and wanted.version is None:
        return [or_(and_(IS_SUMMED, *summed), and_(~IS_SUMMED, first.is_not(None)))]
    return [*(or_(one, ~IS_SUMMED) for one in summed), first.is_not(None)]


def _reward_conditions(wanted: SessionFilter) -> list[ColumnElement[bool]]:
    rewarded: list[ColumnElement[bool]] = []
    if wanted.reward is not None:
        rewarded.append(rewards.c.name == wanted.reward)
    if wanted.least is not None:
        rewarded.append(rewards.c.value >= wanted.least)
    if wanted.most is not None:
        rewarded.append(rewards.c.value <= wanted.most)
    if not rewarded:
        return []
    own = rewards.c.session_id == sessions.c.id
    score = rewards.c.kind == RewardKind.SCORE
    return [exists(select(rewards.c.id).where(own, score, *rewarded))]


def _content_conditions(wanted: SessionFilter) -> list[ColumnElement[bool]]:
    """Return the conditions on the session's tokens and messages."""
    found: list[ColumnElement[bool]] = []
    if wanted.fate is not None:
        found.append(_has_fate(wanted))
    if wanted.text:
        found.append(says(wanted.text))
    return found


def _has_fate(wanted: SessionFilter) -> ColumnElement[bool]:
    """Return the condition that tokens of a session have the fate, by its stored account if any."""
    rows = account_rows(select(sessions.c.id).where(~IS_SUMMED), wanted.run).subquery()

    def fated(of: Any, *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
        query = select(of.session_id).where(of.fate == wanted.fate, *conditions)
        if wanted.reason:
            query = query.where(of.reason == wanted.reason)
        return sessions.c.id.in_(query)

    stored = session_fates.c
    return or_(fated(stored, stored.account == (wanted.run or "")), fated(rows.c))
