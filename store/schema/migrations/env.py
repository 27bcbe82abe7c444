"""Alembic's entry, which runs on the connection that ``migrate`` passes."""

from __future__ import annotations

from alembic import context

from bridle.store.schema.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
context.run_migrations()
