"""The store: SQL schema, the durable writer, and queries, on SQLite or PostgreSQL.

``call.py`` declares each fact about a call once, and ``declaration.py`` derives columns, rows and
readers from such declarations. ``schema/`` has tables, views and migrations; ``encoding/`` turns
arrays and bodies into bytes; ``writing/`` commits records, ``reading/`` reads them back;
``operations/`` copies, forgets, leases.
"""
