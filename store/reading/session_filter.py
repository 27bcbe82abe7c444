"""Conditions on sessions, as SQL: of pages, accounts, exports and counts of facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Column, ColumnElement, Select, Text, and_, cast, exists, func, or_, select

from bridle.store.reward import RewardKind
from bridle.store.schema.accounts import account_rows, in_account
from bridle.store.schema.tables import call_kinds, call_messages, calls, rewards, sessions

_OF: Final = calls.c.session_id == sessions.c.id


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """The conditions on the listed sessions; ``None`` for no condition."""

    session: str | None = None
    """The session's id."""
    run: str | None = None
    task: str | None = None
    """The task's own id."""
    group: str | None = None
    harness: str | None = None
    outcome: str | None = None
    """The outcome; ``open`` for sessions that are not sealed."""
    reward: str | None = None
    """Name of a score that the session has."""
    least: float | None = None
    """Minimum value of that score, or of any score if none is named."""
    most: float | None = None
    version: int | None = None
    """A policy version that sampled in the session."""
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
    """Text in a message of the session. Upper and lower case are the same."""
    sessions: Sequence[str] | None = None
    """Ids of sessions. Databases take some hundreds at once."""
    since: float | None = None
    """The earliest time of the session's creation."""
    until: float | None = None
    """The time before which the session was created."""


ALL_SESSIONS: Final = SessionFilter()


def matching(wanted: SessionFilter, query: Select[Any], *, account: bool = False) -> Select[Any]:
    """Return ``query`` over sessions with the filter's conditions.

    With ``account``, the condition on a run includes the sessions of its evaluation, and others
    that it has trained on.
    """
    for column, value in (
        ("id", wanted.session),
        ("task_id", wanted.task),
        ("group_id", wanted.group),
        ("harness", wanted.harness),
    ):
        if value is not None:
            query = query.where(sessions.c[column] == value)
    if wanted.run is not None:
        whole = account or wanted.fate is not None
        own = sessions.c.run_id == wanted.run
        query = query.where(in_account(wanted.run) if whole else own)
    if wanted.sessions is not None:
        query = query.where(sessions.c.id.in_(wanted.sessions))
    if wanted.since is not None:
        query = query.where(sessions.c.created_at >= wanted.since)
    if wanted.until is not None:
        query = query.where(sessions.c.created_at < wanted.until)
    if wanted.outcome == "open":
        query = query.where(sessions.c.sealed_at.is_(None))
    elif wanted.outcome is not None:
        query = query.where(sessions.c.outcome == wanted.outcome)
    for condition in (*_call_conditions(wanted), *_other_conditions(wanted)):
        query = query.where(condition)
    return query


def judged(column: Column[Any]) -> ColumnElement[Any]:
    """Return a column of ``calls`` as it was judged from the record.

    The column is ``kind`` or ``break_reason``. It is as recorded if the call has not been judged.
    """
    verdict = select(call_kinds.c[column.name]).where(call_kinds.c.call_id == calls.c.id)
    return func.coalesce(verdict.scalar_subquery(), column)


def _call_conditions(wanted: SessionFilter) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if wanted.version is not None:
        found.append(
            and_(calls.c.version_start <= wanted.version, calls.c.version_end >= wanted.version)
        )
    if wanted.broke == "any":
        found.append(calls.c.break_reason.is_not(None))
    elif wanted.broke is not None:
        found.append(judged(calls.c.break_reason) == wanted.broke)
    if wanted.status is not None:
        found.append(calls.c.status == wanted.status)
    if wanted.kind is not None:
        found.append(func.coalesce(calls.c.kind_set, judged(calls.c.kind)) == wanted.kind)
    if not found:
        return []
    return [exists(select(calls.c.id).where(_OF, *found))]


def _other_conditions(wanted: SessionFilter) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    rewarded: list[ColumnElement[bool]] = []
    if wanted.reward is not None:
        rewarded.append(rewards.c.name == wanted.reward)
    if wanted.least is not None:
        rewarded.append(rewards.c.value >= wanted.least)
    if wanted.most is not None:
        rewarded.append(rewards.c.value <= wanted.most)
    if rewarded:
        own = rewards.c.session_id == sessions.c.id
        score = rewards.c.kind == RewardKind.SCORE
        found.append(exists(select(rewards.c.id).where(own, score, *rewarded)))
    if wanted.fate is not None:
        rows = account_rows(run_id=wanted.run).subquery()
        fated = select(rows.c.session_id).where(rows.c.fate == wanted.fate)
        if wanted.reason:
            fated = fated.where(rows.c.reason == wanted.reason)
        found.append(sessions.c.id.in_(fated))
    if wanted.text:
        said = select(calls.c.session_id).join(call_messages, call_messages.c.call_id == calls.c.id)
        contains = or_(
            call_messages.c.content.icontains(wanted.text, autoescape=True),
            cast(call_messages.c.content_json, Text).icontains(wanted.text, autoescape=True),
            cast(call_messages.c.tool_calls, Text).icontains(wanted.text, autoescape=True),
            call_messages.c.reasoning.icontains(wanted.text, autoescape=True),
        )
        found.append(exists(said.where(_OF, contains)))
    return found
