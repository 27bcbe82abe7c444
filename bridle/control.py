"""What a command says when the proxy refuses what it is asked, or does not answer."""

from __future__ import annotations

from typing import NoReturn

from bridle.terminal import fail
from harnesses.client import ControlError, ProxySilent, ProxyUnreachable


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
