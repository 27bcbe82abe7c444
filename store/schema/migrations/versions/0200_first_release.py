"""The schema of release 0.2.0, the first one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0200"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "policies",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("verified", sa.Boolean(), nullable=False),
        sa.Column("logprob_gap", sa.Float(precision=53), nullable=True),
        sa.Column("published_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("pk_policies")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.Float(precision=53), nullable=False),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.Column("status", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_table(
        "served",
        sa.Column("engine", sa.String(length=512), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("reported_at", sa.Float(precision=53), nullable=False),
        sa.Column("weights_fingerprint", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("engine", name=op.f("pk_served")),
    )
    op.create_table(
        "tasks",
        sa.Column("suite", sa.String(length=128), nullable=False),
        sa.Column("split", sa.String(length=32), nullable=False),
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("suite", "split", "id", name=op.f("pk_tasks")),
    )
    op.create_table(
        "writers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("process", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Float(precision=53), nullable=False),
        sa.Column("seen_at", sa.Float(precision=53), nullable=False),
        sa.Column("lease", sa.Float(precision=53), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("deployment", sa.Text(), nullable=True),
        sa.Column("control_revision", sa.BigInteger(), nullable=True),
        sa.Column("control_report", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_writers")),
    )
    op.create_table(
        "control",
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("deployment", sa.Text(), nullable=False),
        sa.Column("change", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("revision", name=op.f("pk_control")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "metrics",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("value", sa.Float(precision=53), nullable=True),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_metrics_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "step", "name", name=op.f("pk_metrics")),
    )
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=True),
        sa.Column("task_suite", sa.String(length=128), nullable=True),
        sa.Column("task_split", sa.String(length=32), nullable=True),
        sa.Column("task_id", sa.String(length=128), nullable=True),
        sa.Column("group_id", sa.String(length=128), nullable=True),
        sa.Column("harness", sa.String(length=128), nullable=True),
        sa.Column("name", sa.String(length=256), nullable=True),
        sa.Column("key_hash", sa.String(length=64), nullable=True),
        sa.Column("expires_at", sa.Float(precision=53), nullable=True),
        sa.Column("continuation", sa.String(length=16), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("sealed_at", sa.Float(precision=53), nullable=True),
        sa.Column("outcome", sa.String(length=32), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_sessions_run_id_runs")),
        sa.ForeignKeyConstraint(
            ["task_suite", "task_split", "task_id"],
            ["tasks.suite", "tasks.split", "tasks.id"],
            name=op.f("fk_sessions_task_suite_task_split_task_id_tasks"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_sessions_key_hash")),
        sa.UniqueConstraint("name", name=op.f("uq_sessions_name")),
    )
    op.create_index(
        "ix_sessions_anonymous",
        "sessions",
        ["key_hash", "name", "created_at", "id"],
        unique=False,
        sqlite_where=sa.text("name IS NULL AND key_hash IS NULL"),
        postgresql_where=sa.text("name IS NULL AND key_hash IS NULL"),
    )
    op.create_index(op.f("ix_sessions_created_at"), "sessions", ["created_at"], unique=False)
    op.create_index(op.f("ix_sessions_group_id"), "sessions", ["group_id"], unique=False)
    op.create_index(op.f("ix_sessions_run_id"), "sessions", ["run_id"], unique=False)
    op.create_index(op.f("ix_sessions_sealed_at"), "sessions", ["sealed_at"], unique=False)
    op.create_table(
        "calls",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("writer_id", sa.String(length=64), nullable=False),
        sa.Column("dialect", sa.String(length=16), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("role", sa.Text(), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("parent_call_id", sa.String(length=64), nullable=True),
        sa.Column("lineage_rule", sa.String(length=32), nullable=True),
        sa.Column("break_reason", sa.String(length=32), nullable=True),
        sa.Column("base_call_id", sa.String(length=64), nullable=True),
        sa.Column("base_choice", sa.Integer(), nullable=True),
        sa.Column("retry_of", sa.String(length=64), nullable=True),
        sa.Column("confidence", sa.Float(precision=53), nullable=True),
        sa.Column("differs", sa.JSON(), nullable=True),
        sa.Column("digests", sa.LargeBinary(), nullable=True),
        sa.Column("request_messages", sa.Integer(), nullable=True),
        sa.Column("instructions", sa.Boolean(), nullable=True),
        sa.Column("tools_id", sa.LargeBinary(length=16), nullable=True),
        sa.Column("model_requested", sa.Text(), nullable=False),
        sa.Column("model_served", sa.Text(), nullable=True),
        sa.Column("prompt_span_id", sa.String(length=80), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("sampled_tokens", sa.Integer(), nullable=True),
        sa.Column("version_start", sa.BigInteger(), nullable=True),
        sa.Column("version_end", sa.BigInteger(), nullable=True),
        sa.Column("finish_reason", sa.String(length=32), nullable=True),
        sa.Column("request_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("response_sha256", sa.LargeBinary(length=32), nullable=True),
        sa.Column("headers", sa.JSON(), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=True),
        sa.Column("usage", sa.JSON(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("notes", sa.JSON(), nullable=True),
        sa.Column("started_at", sa.Float(precision=53), nullable=False),
        sa.Column("first_token_at", sa.Float(precision=53), nullable=True),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.Column("kind_set", sa.String(length=16), nullable=True),
        sa.Column("role_set", sa.Text(), nullable=True),
        sa.Column("kind_by", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_calls_session_id_sessions")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_calls")),
    )
    op.create_index(
        "ix_calls_open",
        "calls",
        ["writer_id"],
        unique=False,
        sqlite_where=sa.text("status = 'open'"),
        postgresql_where=sa.text("status = 'open'"),
    )
    op.create_index(
        op.f("ix_calls_session_id_started_at"), "calls", ["session_id", "started_at"], unique=False
    )
    op.create_table(
        "leases",
        sa.Column("consumer", sa.String(length=64), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("lease_id", sa.String(length=64), nullable=False),
        sa.Column("until", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_leases_session_id_sessions")
        ),
        sa.PrimaryKeyConstraint("consumer", "session_id", name=op.f("pk_leases")),
    )
    op.create_index(op.f("ix_leases_session_id"), "leases", ["session_id"], unique=False)
    op.create_table(
        "rewards",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("call_id", sa.String(length=64), nullable=True),
        sa.Column("turn", sa.Integer(), nullable=True),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("value", sa.Float(precision=53), nullable=False),
        sa.Column("source", sa.String(length=128), nullable=True),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_rewards_session_id_sessions")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rewards")),
    )
    op.create_index(op.f("ix_rewards_session_id"), "rewards", ["session_id"], unique=False)
    op.create_table(
        "samples",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("builder", sa.String(length=32), nullable=False),
        sa.Column("builder_version", sa.Integer(), nullable=False),
        sa.Column("rules", sa.JSON(), nullable=False),
        sa.Column("leaf_call_id", sa.String(length=64), nullable=False),
        sa.Column("segments", sa.JSON(), nullable=False),
        sa.Column("weight", sa.Float(precision=53), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_samples_session_id_sessions")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_samples")),
    )
    op.create_index(
        op.f("ix_samples_session_id_builder"), "samples", ["session_id", "builder"], unique=False
    )
    op.create_table(
        "token_fates",
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("builder", sa.String(length=32), nullable=False),
        sa.Column("fate", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_token_fates_session_id_sessions")
        ),
        sa.PrimaryKeyConstraint(
            "session_id", "builder", "fate", "reason", name=op.f("pk_token_fates")
        ),
    )
    op.create_table(
        "tool_sets",
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("id", sa.LargeBinary(length=16), nullable=False),
        sa.Column("definitions", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_tool_sets_session_id_sessions")
        ),
        sa.PrimaryKeyConstraint("session_id", "id", name=op.f("pk_tool_sets")),
    )
    op.create_table(
        "bodies",
        sa.Column("call_id", sa.String(length=64), nullable=False),
        sa.Column("part", sa.String(length=8), nullable=False),
        sa.Column("base_call_id", sa.String(length=64), nullable=True),
        sa.Column("prefix", sa.Integer(), nullable=False),
        sa.Column("suffix", sa.Integer(), nullable=False),
        sa.Column("depth", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["call_id"], ["calls.id"], name=op.f("fk_bodies_call_id_calls")),
        sa.PrimaryKeyConstraint("call_id", "part", name=op.f("pk_bodies")),
    )
    op.create_table(
        "call_kinds",
        sa.Column("call_id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("role", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["call_id"], ["calls.id"], name=op.f("fk_call_kinds_call_id_calls")
        ),
        sa.PrimaryKeyConstraint("call_id", name=op.f("pk_call_kinds")),
    )
    op.create_table(
        "call_messages",
        sa.Column("call_id", sa.String(length=64), nullable=False),
        sa.Column("choice", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("content", sa.Text(), nullable=True),
        sa.Column("content_json", sa.JSON(), nullable=True),
        sa.Column("reasoning", sa.Text(), nullable=True),
        sa.Column("tool_calls", sa.JSON(), nullable=True),
        sa.Column("tool_call_id", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["call_id"], ["calls.id"], name=op.f("fk_call_messages_call_id_calls")
        ),
        sa.PrimaryKeyConstraint("call_id", "choice", "position", name=op.f("pk_call_messages")),
    )
    op.create_table(
        "spans",
        sa.Column("call_id", sa.String(length=64), nullable=False),
        sa.Column("choice", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent_call_id", sa.String(length=64), nullable=True),
        sa.Column("parent_choice", sa.Integer(), nullable=True),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.String(length=32), nullable=True),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("checksum", sa.LargeBinary(length=8), nullable=False),
        sa.ForeignKeyConstraint(["call_id"], ["calls.id"], name=op.f("fk_spans_call_id_calls")),
        sa.PrimaryKeyConstraint("call_id", "choice", name=op.f("pk_spans")),
    )


def downgrade() -> None:
    raise NotImplementedError("there is no release before this one")
