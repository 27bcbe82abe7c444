"""Overlong shaping: a session is punished for length as it nears the limit.

DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4, equation 13). With ``|y|`` the
sampled tokens of a session, ``L`` the limit and ``C`` the margin before it::

    0                      |y| <= L - C
    ((L - C) - |y|) / C    L - C < |y| <= L
    -1                     L < |y|
"""

from __future__ import annotations


def overlong_punishment(sampled: int, limit: int, margin: int) -> float:
    """Return the number that is added to the reward of a session with ``sampled`` tokens.

    The number is from -1 to 0.
    """
    if sampled <= limit - margin:
        return 0.0
    if sampled <= limit:
        return ((limit - margin) - sampled) / margin
    return -1.0
