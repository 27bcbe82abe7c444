"""What a command says when the proxy refuses, does not answer, or is never called by an agent."""

from __future__ import annotations

from typing import Final, NoReturn

from bridle.cli.terminal import fail
from bridle.harnesses.client import ControlError, ProxySilent, ProxyUnreachable

READS_NO_URL: Final = (
    "does the program read OPENAI_BASE_URL, ANTHROPIC_BASE_URL or GOOGLE_GEMINI_BASE_URL?"
)
"""What to look at when an agent ran and nothing was recorded."""


def end_with(error: ControlError | ProxyUnreachable) -> NoReturn:
    """Ends the command with what happened and what to do about it."""
    if isinstance(error, ControlError) and error.status in (401, 403):
        fail(
            f"the proxy answered {error.status}: it wants its admin key; "
            "set BRIDLE_ADMIN_KEY or give --key"
        )
    if isinstance(error, ProxySilent):
        fail(f"{error}. Is `bridle proxy` running?")
    fail(str(error))
