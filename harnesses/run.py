"""``bridle run -- CMD``: any command as one recorded session, with its terminal left alone."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Self

from bridle.harnesses.adapters import Access, Configurable
from bridle.harnesses.client import Client, ControlError, ProxyUnreachable, Session
from bridle.harnesses.environment import redirected
from bridle.harnesses.episode import Outcome
from bridle.harnesses.install import BIN_DIRECTORIES, NotLaunchable, search_path

_TYPED = (signal.SIGINT, signal.SIGQUIT)
_FORWARDED = (*_TYPED, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def _outcome(exit_code: int | None) -> Outcome:
    """Return the outcome of a command with this exit code.

    The code is ``None`` if the command could not be started.
    """
    if exit_code is None:
        return Outcome.INFRASTRUCTURE
    return Outcome.COMPLETED if exit_code == 0 else Outcome.AGENT_ERROR


async def seal_session(client: Client, session: Session, exit_code: int | None) -> str:
    """Seal the session.

    Return ``""``, or the reason if it cannot be sealed: the command's result stands in either case.
    """
    try:
        await client.seal(session.id, _outcome(exit_code))
    except (ProxyUnreachable, ControlError) as error:
        return str(error)
    return ""


@contextmanager
def launch_variables(
    session: Session,
    argv: Sequence[str],
    known: Configurable | None,
    places: Mapping[str, str] | None = None,
) -> Iterator[dict[str, str]]:
    """Yield the variables with which ``argv`` is started as a session.

    ``known`` is the harness that is configured for it, by files that are deleted afterwards, and
    ``places`` are further variables.
    """
    with ExitStack() as stack:
        variables = session_variables(session) | dict(places or {})
        if known is not None:
            variables |= stack.enter_context(_configured(known, session))
        if PurePath(argv[0]).parent in BIN_DIRECTORIES:  # beside the Node that it needs
            variables["PATH"] = search_path(os.environ.get("PATH", os.defpath))
        yield variables


@contextmanager
def _configured(harness: Configurable, session: Session) -> Iterator[dict[str, str]]:
    """Write the harness's configuration to a temporary folder, which is deleted afterwards.

    Yield the environment variables that make the harness use it.
    """
    # Harnesses leave helpers behind that may write on.
    folder = TemporaryDirectory(prefix=f"bridle-{harness.name}-", ignore_cleanup_errors=True)
    with folder as home:
        configuration = harness.configuration(Access(session), Path(home))
        for file, content in configuration.files.items():
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(content, encoding="utf-8")
        yield dict(configuration.environment)


def session_variables(session: Session) -> dict[str, str]:
    """Return the variables by which the usual clients find the session."""
    # Codex takes its key from here; its base URL only from ``-c openai_base_url=…``.
    return {"CODEX_API_KEY": session.key, **session.environment}


def run_command(argv: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run ``argv`` in our place, and return its exit code, or 128 + n if signal n ended it.

    The command has the same terminal, directory and process group. The environment is the caller's
    with ``variables``. Signals to this process are forwarded, except for Ctrl-C and Ctrl-\\ typed
    at the terminal, which the terminal sends to the command as well. Only the main thread may call
    this.

    Raise :class:`NotLaunchable` if the command cannot be started.
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
    """A context that forwards this process's signals to the command.

    Signals that arrive before the command has started are forwarded afterwards.
    """

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
    """Return whether our process group is the terminal's foreground group.

    Our group includes the command.
    """
    for stream in (0, 1, 2):
        try:
            return os.tcgetpgrp(stream) == os.getpgrp()
        except OSError:
            continue
    return False
