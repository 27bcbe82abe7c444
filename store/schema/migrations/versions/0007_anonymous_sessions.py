"""The latest anonymous sessions are found without looking through all named ones."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    anonymous = sa.text("name IS NULL AND key_hash IS NULL")
    op.create_index(
        "ix_sessions_anonymous",
        "sessions",
        ["key_hash", "name", "created_at", "id"],
        sqlite_where=anonymous,
        postgresql_where=anonymous,
    )


def downgrade() -> None:
    op.drop_index("ix_sessions_anonymous", table_name="sessions")
