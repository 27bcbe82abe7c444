"""Environments of the ``verifiers`` package.

``loader.py`` lists their tasks, and ``player.py`` is run by the Python that has them installed.
:mod:`bridle.harnesses.verifiers.environments` reads the file that it leaves.
"""

from bridle.harnesses.tasks.environments.loader import environment_tasks

__all__ = ["environment_tasks"]
