"""The writer of the store: one thread per process, one transaction per batch of records.

``writer.py`` is the face; ``job_queue.py`` gathers records, ``batch.py`` turns them into rows with
the session state of ``cache.py``, and ``rows.py`` writes these; ``liveness.py`` finds calls whose
process died.
"""
