"""Calls and published weights name their policy: a run may train several.

Earlier releases had a single policy, ``policy``, to which all their published weights belong. Their
calls name none, which means the same.
"""

import sqlalchemy as sa
from alembic import op

revision = "0203"
down_revision = "0202"


def upgrade() -> None:
    with op.batch_alter_table("calls") as calls:
        calls.add_column(sa.Column("policy", sa.String(128)))
    with op.batch_alter_table("policies") as policies:
        policies.add_column(
            sa.Column("name", sa.String(128), nullable=False, server_default="policy")
        )
        policies.drop_constraint("pk_policies", type_="primary")
        policies.create_primary_key("pk_policies", ["run_id", "name", "version"])
    with op.batch_alter_table("policies") as policies:
        policies.alter_column("name", server_default=None)
