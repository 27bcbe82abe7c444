"""Serving in the foreground until a signal, for the commands that do."""

from __future__ import annotations

import signal
import threading

from bridle.terminal import out, print_json


def announce(url: str, json: bool, *lines: str) -> None:
    """Tells where it serves: one JSON line for programs, ``lines`` for a person."""
    if json:
        print_json({"url": url})
        return
    for line in lines:
        out.print(line, highlight=False, soft_wrap=True)


def wait_for_signal() -> None:
    """Returns on SIGINT or SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
