"""The verdict on a call has the reason of its break, which is found in the record."""

import sqlalchemy as sa
from alembic import op

revision = "0207"
down_revision = "0206"


def upgrade() -> None:
    with op.batch_alter_table("call_kinds") as verdicts:
        verdicts.add_column(sa.Column("break_reason", sa.String(32)))
