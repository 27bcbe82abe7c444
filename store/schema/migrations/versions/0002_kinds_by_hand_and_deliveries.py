"""Kinds set by hand, and the feed's deliveries in a table of their own."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_BY_HAND = (("kind_set", sa.String(16)), ("role_set", sa.Text()), ("kind_by", sa.Text()))


def upgrade() -> None:
    for name, kind in _BY_HAND:
        op.add_column("calls", sa.Column(name, kind, nullable=True))
    op.create_table(
        "deliveries",
        sa.Column("consumer", sa.String(length=64), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("lease_id", sa.String(length=64), nullable=False),
        sa.Column("until", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_deliveries_session_id_sessions")
        ),
        sa.PrimaryKeyConstraint("consumer", "session_id", name=op.f("pk_deliveries")),
    )
    op.create_index(op.f("ix_deliveries_session_id"), "deliveries", ["session_id"])
    op.create_index(op.f("ix_sessions_sealed_at"), "sessions", ["sealed_at"])
    _keep_acknowledged()


def downgrade() -> None:
    op.drop_index(op.f("ix_sessions_sealed_at"), table_name="sessions")
    op.drop_index(op.f("ix_deliveries_session_id"), table_name="deliveries")
    op.drop_table("deliveries")
    for name, _ in reversed(_BY_HAND):
        op.drop_column("calls", name)


def _keep_acknowledged() -> None:
    """What consumers had acknowledged was in the ``config`` of their runs, as a position among the
    sealed sessions and the ones done beyond it."""
    connection = op.get_bind()
    runs = connection.execute(sa.text("SELECT id, config FROM runs WHERE kind = 'feed'")).all()
    for run_id, config in runs:
        state = json.loads(config) if isinstance(config, str) else config
        at, last = state.get("position") or (None, None)
        sealed = connection.execute(
            sa.text("SELECT id, sealed_at FROM sessions WHERE sealed_at IS NOT NULL")
        ).all()
        done = {
            session_id
            for session_id, sealed_at in sealed
            if session_id in state.get("done", ())
            or (at is not None and (sealed_at, session_id) <= (at, last))
        }
        for session_id in sorted(done):
            connection.execute(
                sa.text(
                    "INSERT INTO deliveries (consumer, session_id, lease_id, until)"
                    " VALUES (:consumer, :session, 'kept', NULL)"
                ),
                {"consumer": run_id.removeprefix("feed:"), "session": session_id},
            )
        connection.execute(sa.text("DELETE FROM runs WHERE id = :id"), {"id": run_id})
