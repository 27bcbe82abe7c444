"""Readers of the store: typed calls, exact tokens and exact bodies.

``queries.py`` is the face (``Reader``); ``loading.py`` decodes spans, messages and bodies for
readers and for the writer.
"""
