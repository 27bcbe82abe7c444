"""The version of a policy and a pause are rows (``gates``), and no longer a log of changes.

Engines belong to a deployment. The versions that engines served before are not known to belong to
one, so they are reported again by the next publish.
"""

import sqlalchemy as sa
from alembic import op

revision = "0207"
down_revision = "0206"


def upgrade() -> None:
    op.drop_table("control")
    op.drop_table("served")
    with op.batch_alter_table("writers") as writers:
        writers.drop_column("control_revision")
        writers.drop_column("control_report")
        writers.add_column(sa.Column("seen", sa.BigInteger))
        writers.add_column(sa.Column("report", sa.JSON))
    op.create_table(
        "gates",
        sa.Column("deployment", sa.String(512), nullable=False),
        sa.Column("policy", sa.String(128), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("model", sa.Text),
        sa.Column("paused", sa.Boolean, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("deployment", "policy", name="pk_gates"),
    )
    op.create_table(
        "served",
        sa.Column("deployment", sa.String(512), nullable=False),
        sa.Column("engine", sa.String(512), nullable=False),
        sa.Column("policy", sa.String(128), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("published", sa.BigInteger, nullable=False),
        sa.Column("reported_at", sa.Float(53), nullable=False),
        sa.Column("weights_fingerprint", sa.Text),
        sa.PrimaryKeyConstraint("deployment", "engine", name="pk_served"),
    )
