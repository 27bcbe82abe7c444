"""SQL schema, the durable writer and queries: SQLite by default, PostgreSQL at scale."""
