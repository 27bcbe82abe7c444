"""The title of a session: the user's request, without the text that the harness wrote around it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from bridle.wrappers import wrappers_of

LONGEST: Final = 240
"""Maximum characters of a title."""


def title(texts: Iterable[str], harness: str | None = None) -> str:
    """Return the first of ``texts`` that a user wrote, or "" if there is none.

    It is on one line and without the parts that ``harness`` writes (:mod:`bridle.wrappers`).
    """
    wrappers = wrappers_of(harness)
    for text in texts:
        bare = " ".join(wrappers.without(text).split())
        if bare:
            return bare[:LONGEST]
    return ""
