"""Rewards have a kind: a score, or a finding with its mode.

Earlier releases recorded the findings of a guard as rewards named ``guard:NAME``, which were summed
with the others. These rows become findings named ``NAME``. Their mode is ``warn``, because the
effect of the run's mode is in the session's reward or outcome already.
"""

import sqlalchemy as sa
from alembic import op

revision = "0204"
down_revision = "0203"


def upgrade() -> None:
    with op.batch_alter_table("rewards") as batch:
        batch.add_column(sa.Column("kind", sa.String(16), nullable=False, server_default="score"))
        batch.add_column(sa.Column("mode", sa.String(16)))
    op.execute(
        "UPDATE rewards SET kind = 'finding', mode = 'warn', name = substr(name, 7) "
        "WHERE substr(name, 1, 6) = 'guard:' AND length(name) > 6"
    )
