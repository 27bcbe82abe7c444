"""Tables, views and migrations, and the way to a database.

``tables.py`` is the schema that everything else reads and writes; ``database.py`` connects to a
database and brings any older one to it.
"""
