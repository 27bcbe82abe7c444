"""Verifiers, which score a session by what the agent left behind: its answer and its workspace.

A verifier is an async callable from a :class:`Delivery` to named scores, or to :class:`Score`
objects, which have places in the session. It does not see the
recorded calls, so that a reward cannot depend on the style of the work.

``command.py``, ``harbor.py`` and ``environments.py`` run in the session's sandbox. A function that
is named (``separate.py``) runs in a process of its own, with bounds. A function object
(``function.py``) and an ``async`` function run in the process that runs the sessions.
"""

from bridle.harnesses.verifiers.answers import ExactAnswer, NumberAnswer, RegexAnswer, numbers_in
from bridle.harnesses.verifiers.command import CommandVerifier
from bridle.harnesses.verifiers.delivery import (
    REWARD,
    Delivery,
    Judgement,
    NoVerdict,
    Score,
    Scores,
    TaskUnfit,
    Verdict,
    Verifier,
    VerifierError,
)
from bridle.harnesses.verifiers.function import FunctionVerifier
from bridle.harnesses.verifiers.separate import SeparateFunction

__all__ = [
    "REWARD",
    "CommandVerifier",
    "Delivery",
    "ExactAnswer",
    "FunctionVerifier",
    "Judgement",
    "NoVerdict",
    "NumberAnswer",
    "RegexAnswer",
    "Score",
    "Scores",
    "SeparateFunction",
    "TaskUnfit",
    "Verdict",
    "Verifier",
    "VerifierError",
    "numbers_in",
]
