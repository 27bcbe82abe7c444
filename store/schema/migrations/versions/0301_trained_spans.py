"""The trainer's scores of sampled tokens: the table ``trained_spans``."""

import sqlalchemy as sa
from alembic import op

revision = "0301"
down_revision = "0300"


def upgrade() -> None:
    op.create_table(
        "trained_spans",
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("call_id", sa.String(64), sa.ForeignKey("calls.id"), nullable=False),
        sa.Column("choice", sa.Integer, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("logprobs", sa.LargeBinary, nullable=False),
        sa.Column("entropies", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("call_id", "choice"),
    )
