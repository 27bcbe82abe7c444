"""Helpers for commands that serve in the foreground until a signal."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bridle.cli.terminal import fail, out, print_json
from bridle.run.services import LAUNCHER_VARIABLE

POLL_S = 0.5


@contextmanager
def listening_on(host: str, port: int) -> Iterator[None]:
    """End the command with one line if the server opened in the context cannot listen there."""
    try:
        yield
    except OSError as error:
        # asyncio repeats the address in ``strerror``.
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = "; choose another --port" if error.errno == errno.EADDRINUSE else ""
        fail(f"cannot listen on {host}:{port}: {reason}{remedy}")


def announce(url: str, json: bool, *lines: str, **more: Any) -> None:
    """Print the address: one JSON line with ``more`` for a program, or ``lines`` for a person."""
    if json:
        print_json({"url": url, **more})
        return
    for line in lines:
        out.print(line)


def stop_signals() -> threading.Event:
    """Make SIGINT and SIGTERM set the returned event from now on.

    It is called before a service starts: an interrupt while its thread starts would end the process
    without stopping it.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def wait_for(stop: threading.Event, ended: Callable[[], bool] | None = None) -> None:
    """Return when ``stop`` is set, or when ``ended`` returns true.

    A service that another command started (``LAUNCHER_VARIABLE`` holds its process id) also returns
    when that process is gone, because a process that is killed cannot stop its services.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    # Python's handler of a signal that comes just before a wait runs only after it.
    while not stop.wait(POLL_S):
        if ended is not None and ended():
            return
        if launcher is not None and os.getppid() != int(launcher):
            return


def leave_on_sigterm() -> None:
    """Make SIGTERM end the process as Ctrl-C does: through every ``finally`` on the way out.

    The end of the terminal does the same, unless ``nohup`` has it ignored.
    """
    # A shell starts its background jobs with SIGINT ignored, and Python then leaves it so.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Raised again as SIGINT, for which asyncio has a handler of its own while a loop runs.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGINT))
