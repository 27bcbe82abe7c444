"""Scorers, which read a finished session's record and return rewards at places in it.

A run names them beside its verifier. ``session.py`` defines their argument: the turns with outputs
of tools, the branches, roles and usage, the task, and artefacts of the workspace. ``named.py``
makes a scorer from a name: a plain function runs in a process of its own with bounds, as a
verifier's does, and an ``async`` function in the process that runs the sessions. A scorer that
fails costs no session: ``outcome.py`` reports it as a finding. Before a training run, ``trial.py``
tries each on a made-up session.

``usage.py``, ``form.py`` and ``rubric.py`` are the built-in ones; ``judging.py`` asks a model
through the proxy.
"""

from bridle.harnesses.scorers.named import SCORERS as SCORERS
from bridle.harnesses.scorers.named import Scorer as Scorer
from bridle.harnesses.scorers.named import scorers as scorers
from bridle.harnesses.scorers.session import FinishedSession as FinishedSession
from bridle.harnesses.scorers.session import Turn as Turn
