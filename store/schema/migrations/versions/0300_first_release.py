"""The schema of the first release.

It has no steps: a database without a revision gets the newest schema at once
(:func:`bridle.store.schema.database.migrate`), and later migrations begin here. A release's own
tables are kept with the rows of a small store (``tests/store/released.py``).
"""

revision = "0300"
down_revision = None
