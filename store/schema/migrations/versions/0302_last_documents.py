"""The mark of the last document of a session in the search."""

import sqlalchemy as sa
from alembic import op

revision = "0302"
down_revision = "0301"


def upgrade() -> None:
    op.add_column("search_documents", sa.Column("last", sa.Boolean))
    op.drop_index("ix_search_documents_session_id", "search_documents")
    op.create_index(
        "ix_search_documents_session_id_last", "search_documents", ["session_id", "last"]
    )
    op.execute(
        "UPDATE search_documents SET last = true WHERE id IN ("
        "SELECT max(id) FROM search_documents WHERE session_id IN"
        " (SELECT session_id FROM session_totals) GROUP BY session_id)"
    )
