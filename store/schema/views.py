"""The views by which people read a store.

They are ``turns``, ``messages``, ``tool_calls``, ``scores`` and ``token_accounts``.

They are not part of the migrations' steps: a migration drops the views and creates them again from
here. So a changed view needs a migration too, even if it has no steps. docs/sql.md describes them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sqlalchemy import Connection

from bridle.store.schema import accounts
from bridle.store.schema.tables import calls, sessions


class ViewColumn(NamedTuple):
    """A column of the view ``turns``."""

    name: str
    sql: str
    meaning: str
    """One sentence for people, without its full stop."""


_AS: Final = {
    "id": ("call_id", "c.id"),
    "kind": ("kind", "COALESCE(c.kind_set, k.kind, c.kind)"),
    "role": (
        "role",
        "CASE WHEN c.kind_set IS NOT NULL THEN c.role_set ELSE COALESCE(c.role, k.role) END",
    ),
    "break_reason": ("break_reason", "COALESCE(k.break_reason, c.break_reason)"),
    "model_served": ("model", "c.model_served"),
    "policy": (
        "policy",
        "CASE WHEN c.status IN ('open', 'interrupted')"
        """ OR CAST(c.notes AS TEXT) LIKE '%%"model_frozen"%%' THEN NULL"""
        " ELSE COALESCE(c.policy, 'policy') END",
    ),
}
"""Columns of ``calls`` that the view shows under another name, or with what was found later."""
_MEANINGS: Final = {
    "kind": "The purpose of the call, as a person decided it or as it was classified last",
    "policy": "The trained policy that was asked; NULL for a model that is never trained",
}
_SAMPLING: Final = {
    "temperature": "DOUBLE PRECISION",
    "top_p": "DOUBLE PRECISION",
    "top_k": "INTEGER",
    "min_p": "DOUBLE PRECISION",
    "max_tokens": "INTEGER",
    "presence_penalty": "DOUBLE PRECISION",
    "frequency_penalty": "DOUBLE PRECISION",
    "repetition_penalty": "DOUBLE PRECISION",
}
"""Sampling parameters with columns of their own."""
_OF_SESSION: Final = {
    "session_name": "name",
    **{name: name for name in ("harness", "run_id", "group_id", "outcome")},
    **{name: name for name in ("task_suite", "task_split", "task_id")},
}
"""Columns of the call's session."""


def turn_columns() -> list[ViewColumn]:
    """Return the columns of the view ``turns``.

    They are those of ``calls`` that are shown, and some of the call's sampling parameters and of
    its session.
    """
    found = [ViewColumn("turn", "c.turn", "Number of the call in its session, from 1")]
    for one in (column.info["stored"] for column in calls.columns):
        if one.fact.shown:
            name, sql = _AS.get(one.name, (one.name, f"c.{one.name}"))
            found.append(ViewColumn(name, sql, _MEANINGS.get(name, one.fact.meaning)))
    for name, kind in _SAMPLING.items():
        sql = f"CAST(c.sampling ->> '{name}' AS {kind})"
        found.append(ViewColumn(name, sql, f"The member `{name}` of `sampling`"))
    for name, column in _OF_SESSION.items():
        meaning = sessions.c[column].info["stored"].fact.meaning
        found.append(ViewColumn(name, f"s.{column}", meaning))
    return found


_TURNS: Final = """
CREATE VIEW turns AS
SELECT {columns}
FROM (
    SELECT calls.*,
        ROW_NUMBER() OVER (PARTITION BY session_id ORDER BY started_at, id) AS turn
    FROM calls
) c
JOIN sessions s ON s.id = c.session_id
LEFT JOIN call_kinds k ON k.call_id = c.id
WHERE c.kind <> 'count'
"""

_MESSAGES: Final = """
CREATE VIEW messages AS
SELECT
    t.session_id, t.turn, m.position,
    CASE WHEN m.choice < 0 THEN 'request' ELSE 'reply' END AS origin,
    CASE WHEN m.choice < 0 THEN NULL ELSE m.choice END AS choice,
    m.role, m.content, CAST(m.content_json AS TEXT) AS content_json,
    m.reasoning, m.tool_calls, m.tool_call_id, m.name,
    t.call_id, t.kind, t.status, t.session_name
FROM turns t
JOIN call_messages m ON m.call_id = t.call_id
"""

_TOOL_CALLS: Final = """
CREATE VIEW tool_calls AS
SELECT
    t.session_id, t.turn, t.call_id, m.choice,
    one.value ->> 'id' AS id,
    one.value ->> 'name' AS name,
    one.value ->> 'arguments' AS arguments,
    t.kind, t.status
FROM turns t
JOIN call_messages m ON m.call_id = t.call_id AND m.choice >= 0
CROSS JOIN {each}(m.tool_calls) one
"""

_SCORES: Final = """
CREATE VIEW scores AS
SELECT
    r.session_id, r.role, r.branch, r.call_id, r.turn, r.name,
    CASE
        WHEN r.value > 0 AND EXISTS (
            SELECT 1 FROM rewards f
            WHERE f.session_id = r.session_id AND f.kind = 'finding' AND f.mode <> 'warn'
        ) THEN 0.0
        ELSE r.value
    END AS value,
    r.source, r.detail, r.created_at
FROM (
    SELECT rewards.*,
        ROW_NUMBER() OVER (
            PARTITION BY session_id, role, branch, call_id, turn, name, source
            ORDER BY created_at DESC, id DESC
        ) AS place
    FROM rewards
    WHERE kind = 'score'
) r
WHERE r.place = 1
"""
"""The latest score of each place, name and source. Findings and successes are left out, and no
score is above 0 in a session that a finding zeroes or quarantines."""

_EACH: Final = {"sqlite": "json_each", "postgresql": "json_array_elements"}
_NAMES: Final = ("token_accounts", "tool_calls", "messages", "turns", "scores")


def drop_views(connection: Connection) -> None:
    """Drop the views, because a table below them cannot be changed."""
    for name in _NAMES:
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")


def create_views(connection: Connection) -> None:
    tool_calls = _TOOL_CALLS.format(each=_EACH[connection.dialect.name])
    turns = _TURNS.format(columns=", ".join(f"{one.sql} AS {one.name}" for one in turn_columns()))
    for statement in (turns, _MESSAGES, tool_calls, _SCORES):
        connection.exec_driver_sql(statement)
    accounts.create_view(connection)
