"""Harbor task folders (schema 1.x): ``config.py`` reads ``task.toml``, ``loader.py`` makes tasks of
folders, ``verifier.py`` runs their tests as Harbor does, ``writing.py`` writes such folders.
"""

from bridle.harnesses.tasks.harbor.loader import harbor_tasks

__all__ = ["harbor_tasks"]
