"""The command line as a process, ports for servers, and waiting for a condition."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings


def bridle(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``bridle ARGUMENTS`` and return its exit status and texts."""
    command = [sys.executable, "-m", "bridle", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def serve(settings: ProxySettings) -> None:
    """Run a proxy until a signal ends this process. A forked process can call it."""
    with ProxyServer(settings):
        signal.pause()


def free_port() -> int:
    """Return a port of this machine at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def until(
    condition: Callable[[], object],
    seconds: float = 30.0,
    failure: Callable[[], str] = lambda: "it did not come true",
) -> None:
    """Wait until the condition is true. Fail with the text of ``failure`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, failure()
        time.sleep(0.02)
