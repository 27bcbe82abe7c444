"""Training runs account for tokens, and a run has attempts.

The accounts of earlier samples show which tokens the rules allow, so these tokens become
``trainable``. Runs of earlier releases have no attempts.
"""

import sqlalchemy as sa
from alembic import op

revision = "0205"
down_revision = "0204"


def upgrade() -> None:
    with op.batch_alter_table("token_fates") as fates:
        fates.add_column(sa.Column("run_id", sa.String(64), nullable=False, server_default=""))
        fates.add_column(sa.Column("step", sa.Integer))
        fates.add_column(sa.Column("version", sa.BigInteger))
        fates.add_column(sa.Column("at", sa.Float(53)))
        fates.drop_constraint("pk_token_fates", type_="primary")
        fates.create_primary_key(
            "pk_token_fates", ["session_id", "builder", "run_id", "fate", "reason"]
        )
    with op.batch_alter_table("token_fates") as fates:
        fates.alter_column("run_id", server_default=None)
    op.execute("UPDATE token_fates SET fate = 'trainable' WHERE fate = 'trained'")
    with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("reason", sa.Text))
    op.create_table(
        "attempts",
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("writer_id", sa.String(64)),
        sa.Column("started_at", sa.Float(53), nullable=False),
        sa.Column("ended_at", sa.Float(53)),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("reason", sa.Text),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_attempts_run_id_runs"),
        sa.PrimaryKeyConstraint("run_id", "number", name="pk_attempts"),
    )
