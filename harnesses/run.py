"""``bridle run -- CMD``: any command as one recorded session, its terminal untouched."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Self

from bridle.harnesses.client import Client, ControlError, ProxyUnreachable, Session
from bridle.harnesses.environment import redirected
from bridle.harnesses.episode import Outcome
from bridle.harnesses.sandboxes.base import NotLaunchable

_TYPED = (signal.SIGINT, signal.SIGQUIT)
_FORWARDED = (*_TYPED, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def _outcome(exit_code: int | None) -> Outcome:
    """Of a command with this exit code; ``None``: it could not be started."""
    if exit_code is None:
        return Outcome.INFRASTRUCTURE
    return Outcome.COMPLETED if exit_code == 0 else Outcome.AGENT_ERROR


async def seal_session(client: Client, session: Session, exit_code: int | None) -> str:
    """Seals the session; the reason as text when it cannot be: the command's result stands."""
    try:
        await client.seal(session.id, _outcome(exit_code))
    except (ProxyUnreachable, ControlError) as error:
        return str(error)
    return ""


def session_variables(session: Session) -> dict[str, str]:
    """The variables by which the usual clients find the session.

    The proxy's own suggestion wins; what it leaves out is derived from the base URLs.
    """
    urls, key = session.base_urls, session.key
    variables: dict[str, str] = {}
    if "openai" in urls:
        variables |= {
            "OPENAI_BASE_URL": urls["openai"],
            "OPENAI_API_BASE": urls["openai"],
            "OPENAI_API_KEY": key,
            # Codex takes its key from here; its base URL only from ``-c openai_base_url=…``.
            "CODEX_API_KEY": key,
        }
    if "anthropic" in urls:
        variables |= {"ANTHROPIC_BASE_URL": urls["anthropic"], "ANTHROPIC_AUTH_TOKEN": key}
    if "google" in urls:
        variables |= {"GOOGLE_GEMINI_BASE_URL": urls["google"], "GEMINI_API_KEY": key}
    return variables | session.environment


def run_command(argv: Sequence[str], variables: Mapping[str, str]) -> int:
    """Runs ``argv`` in our place: same terminal, same directory, same process group.

    The environment is the caller's with ``variables``. Signals to us are forwarded, but for Ctrl-C
    and Ctrl-\\ typed at the terminal, which the command gets from there. Returns its exit code,
    128 + n when signal n ended it. To be called from the main thread.

    Raises :class:`NotLaunchable` when it cannot be started.
    """
    with _Forwarder() as forwarder:
        try:
            process = subprocess.Popen(list(argv), env=redirected(os.environ, variables))
        except OSError as error:
            raise NotLaunchable(f"cannot start {argv[0]}: {error.strerror}") from error
        forwarder.serve(process)
        code = process.wait()
    return code if code >= 0 else 128 - code


class _Forwarder:
    """While entered, hands the signals this process gets to the command; early ones wait for it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _FORWARDED:
            self._before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def serve(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        while self._early:
            process.send_signal(self._early.pop(0))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number in _TYPED and _owns_terminal():
            return
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


def _owns_terminal() -> bool:
    """Whether our process group, the command with it, is the terminal's foreground group."""
    for stream in (0, 1, 2):
        try:
            return os.tcgetpgrp(stream) == os.getpgrp()
        except OSError:
            continue
    return False
