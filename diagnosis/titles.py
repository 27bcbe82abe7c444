"""The title of a session: the user's request, without the text that the harness wrote around it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

LONGEST: Final = 240
"""Maximum characters of a title."""
_WRAPPERS: Final = (
    "system-reminder",  # Claude Code
    "command-name|command-message|command-args|local-command-stdout|local-command-caveat",
    "environment_context|user_instructions|permissions|turn_aborted",  # Codex
    "INSTRUCTIONS|skill|environment_details|session_context",
)
_WRAPPED: Final = re.compile(rf"<({'|'.join(_WRAPPERS)})(?:\s[^<>]*)?>.*?(?:</\1>|\Z)", re.DOTALL)
"""A block of a harness. A block whose end was cut off reaches to the end of the text."""
_HEADINGS: Final = re.compile(r"^# AGENTS\.md instructions[^\n]*$", re.MULTILINE)


def title(texts: Iterable[str]) -> str:
    """Return the first of ``texts`` that a user wrote, or "" if there is none.

    It is on one line and without a harness's blocks.
    """
    for text in texts:
        bare = " ".join(_HEADINGS.sub("", _WRAPPED.sub("", text)).split())
        if bare:
            return bare[:LONGEST]
    return ""
