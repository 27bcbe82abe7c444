"""Verifiers, which score a session by what the agent left behind: its answer and its workspace.

A verifier is an async callable from a :class:`Delivery` to named scores. It does not see the
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
    Scores,
    TaskUnfit,
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
    "Scores",
    "SeparateFunction",
    "TaskUnfit",
    "Verifier",
    "VerifierError",
    "numbers_in",
]
