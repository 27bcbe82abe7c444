"""What an engine itself said of its weights when it was told to serve a version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("served", sa.Column("weights_fingerprint", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("served", "weights_fingerprint")
