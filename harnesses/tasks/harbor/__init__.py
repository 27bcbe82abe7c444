"""Harbor task folders (schema 1.x).

``config.py`` reads ``task.toml``, ``loader.py`` makes tasks of folders, and ``swe.py`` writes such
folders, with ``grade.py`` in them. :mod:`bridle.harnesses.verifiers.harbor` runs their tests as
Harbor does.
"""

from bridle.harnesses.tasks.harbor.loader import harbor_tasks

__all__ = ["harbor_tasks"]
