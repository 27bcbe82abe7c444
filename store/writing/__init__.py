"""From records to committed rows: one thread per process, one transaction per batch.

``writer.py`` is the face; ``job_queue.py`` gathers, ``batch.py`` prepares rows with the session
state of ``cache.py``, ``rows.py`` writes them; ``liveness.py`` finds calls whose process died.
"""
