"""What each engine was last said to serve, so that every proxy process knows after a restart."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "served",
        sa.Column("engine", sa.String(length=512), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("told_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("engine", name=op.f("pk_served")),
    )


def downgrade() -> None:
    op.drop_table("served")
