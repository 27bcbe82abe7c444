"""The text that each harness writes around a user's request, which is no part of the request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final


@dataclass(frozen=True, slots=True)
class Wrappers:
    """The parts of a user's message that a harness writes."""

    tags: tuple[str, ...] = ()
    """Names of the elements that it adds, such as ``system-reminder``. An element whose end was cut
    off reaches to the end of the text."""
    headings: tuple[str, ...] = ()
    """Beginnings of the lines that it adds."""

    def without(self, text: str) -> str:
        """Return ``text`` without these parts."""
        for pattern in _patterns(self):
            text = pattern.sub("", text)
        return text


@cache
def _patterns(wrappers: Wrappers) -> tuple[re.Pattern[str], ...]:
    tags, lines = ("|".join(map(re.escape, each)) for each in (wrappers.tags, wrappers.headings))
    elements = rf"<({tags})(?:\s[^<>]*)?>.*?(?:</\1>|\Z)"
    found = [re.compile(elements, re.DOTALL)] if tags else []
    return tuple(found + ([re.compile(rf"^(?:{lines})[^\n]*$", re.MULTILINE)] if lines else []))


WRAPPERS: Final[Mapping[str, Wrappers]] = {
    "codex": Wrappers(
        (
            "environment_context",
            "user_instructions",
            "permissions",
            "turn_aborted",
            "INSTRUCTIONS",
            "skill",
        ),
        ("# AGENTS.md instructions",),
    ),
    "claude-code": Wrappers(
        (
            "system-reminder",
            "command-name",
            "command-message",
            "command-args",
            "local-command-stdout",
            "local-command-caveat",
        )
    ),
    "qwen-code": Wrappers(("system-reminder", "session_context")),
    "gemini-cli": Wrappers(("session_context",)),
    "pi": Wrappers(("skill",)),
    "opencode": Wrappers(("system-reminder",)),
    "mini-swe-agent": Wrappers(),
    "oracle": Wrappers(),
    "verifiers": Wrappers(),
}
"""The declaration of each harness that has an adapter, by its name."""
ANY: Final = Wrappers(
    tuple(dict.fromkeys(tag for one in WRAPPERS.values() for tag in one.tags)),
    tuple(dict.fromkeys(line for one in WRAPPERS.values() for line in one.headings)),
)
"""The parts of all of them, for a session whose harness is not known."""


def wrappers_of(harness: str | None) -> Wrappers:
    """Return the declaration of a harness, or :data:`ANY` for one without a declaration."""
    return ANY if harness is None else WRAPPERS.get(harness, ANY)
