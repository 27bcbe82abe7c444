"""The schema of release 0.2.0, the first one.

It has no steps: a database without a revision gets the newest schema at once
(:func:`bridle.store.schema.database.migrate`), and later migrations begin here. Its own tables are
kept with the rows of that release (``tests/store/released.py``).
"""

revision = "0200"
down_revision = None
