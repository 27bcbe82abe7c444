"""Sessions keep the hash of their verifier key, which is drawn at random.

Until now the key was computed from the admin key. Such keys open nothing any more: a holder of the
admin key asks for a new one (``POST /bridle/v1/sessions/{id}/verifier-key``).
"""

import sqlalchemy as sa
from alembic import op

revision = "0206"
down_revision = "0205"


def upgrade() -> None:
    with op.batch_alter_table("sessions") as sessions:
        sessions.add_column(sa.Column("verifier_key_hash", sa.String(64)))
