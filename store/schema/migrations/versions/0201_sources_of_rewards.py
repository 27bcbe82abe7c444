"""Rewards have a source that the server assigned.

Until now a session's own key could write rewards and name any source, so nothing that an earlier
release recorded shows who scored: those rewards become ``unattested``.
"""

import sqlalchemy as sa
from alembic import op

revision = "0201"
down_revision = "0200"


def upgrade() -> None:
    op.execute("UPDATE rewards SET source = 'unattested'")
    with op.batch_alter_table("rewards") as batch:
        batch.alter_column(
            "source", existing_type=sa.String(128), type_=sa.String(16), nullable=False
        )
