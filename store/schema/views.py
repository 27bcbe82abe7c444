"""The views ``turns``, ``messages``, ``tool_calls``, ``scores`` and ``token_accounts``, by which
people read a store.

They are not part of the migrations' steps: a migration drops the views and creates them again from
here. So a changed view needs a migration too, even if it has no steps. docs/sql.md describes them.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection

from bridle.store.schema import accounts

_TURNS: Final = """
CREATE VIEW turns AS
SELECT
    c.session_id, c.turn, c.id AS call_id,
    COALESCE(c.kind_set, k.kind, c.kind) AS kind,
    CASE WHEN c.kind_set IS NOT NULL THEN c.role_set ELSE COALESCE(c.role, k.role) END AS role,
    c.dialect, c.model_requested, c.model_served AS model,
    CASE
        WHEN c.status IN ('open', 'interrupted')
            OR CAST(c.notes AS TEXT) LIKE '%%"model_frozen"%%' THEN NULL
        ELSE COALESCE(c.policy, 'policy')
    END AS policy,
    c.status, c.reason, c.finish_reason, c.stream,
    c.parent_call_id, c.lineage_rule, COALESCE(k.break_reason, c.break_reason) AS break_reason,
    c.prompt_tokens, c.sampled_tokens, c.version_start, c.version_end,
    CAST(c.sampling ->> 'temperature' AS DOUBLE PRECISION) AS temperature,
    CAST(c.sampling ->> 'top_p' AS DOUBLE PRECISION) AS top_p,
    CAST(c.sampling ->> 'top_k' AS INTEGER) AS top_k,
    CAST(c.sampling ->> 'min_p' AS DOUBLE PRECISION) AS min_p,
    CAST(c.sampling ->> 'max_tokens' AS INTEGER) AS max_tokens,
    CAST(c.sampling ->> 'presence_penalty' AS DOUBLE PRECISION) AS presence_penalty,
    CAST(c.sampling ->> 'frequency_penalty' AS DOUBLE PRECISION) AS frequency_penalty,
    CAST(c.sampling ->> 'repetition_penalty' AS DOUBLE PRECISION) AS repetition_penalty,
    c.sampling, c.sampler, c.usage, c.error, c.notes, c.headers,
    c.started_at, c.first_token_at, c.ended_at,
    s.name AS session_name, s.harness, s.run_id, s.group_id,
    s.task_suite, s.task_split, s.task_id, s.outcome
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
    r.session_id, r.call_id, r.turn, r.name,
    CASE
        WHEN r.value > 0 AND EXISTS (
            SELECT 1 FROM rewards f
            WHERE f.session_id = r.session_id AND f.kind = 'finding' AND f.mode <> 'warn'
                AND f.source <> 'unattested'
        ) THEN 0.0
        ELSE r.value
    END AS value,
    r.source, r.detail, r.created_at
FROM (
    SELECT rewards.*,
        ROW_NUMBER() OVER (
            PARTITION BY session_id, call_id, turn, name, source
            ORDER BY created_at DESC, id DESC
        ) AS place
    FROM rewards
    WHERE kind = 'score'
) r
WHERE r.place = 1
"""
"""The latest score of each place, name and source. Findings are left out, and no score is above 0
in a session that a finding zeroes or quarantines."""

_EACH: Final = {"sqlite": "json_each", "postgresql": "json_array_elements"}
_NAMES: Final = ("token_accounts", "tool_calls", "messages", "turns", "scores")


def drop_views(connection: Connection) -> None:
    """Drop the views, because a table below them cannot be changed."""
    for name in _NAMES:
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")


def create_views(connection: Connection) -> None:
    """Create the views."""
    tool_calls = _TOOL_CALLS.format(each=_EACH[connection.dialect.name])
    for statement in (_TURNS, _MESSAGES, tool_calls, _SCORES):
        connection.exec_driver_sql(statement)
    accounts.create_view(connection)
