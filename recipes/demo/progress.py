"""Progress of long work: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LOG_EVERY_S = 15.0
"""Seconds between lines if there is no terminal."""

Tick = Callable[[int, str], None]
"""A function ``tick(done, note)``: the number of units done, and a text to show beside it."""


@contextmanager
def progress(console: Console, label: str, total: int) -> Iterator[Tick]:
    """Show how much of ``total`` is done while the context is open.

    Yield the function that reports it.
    """
    if console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task(label, total=total, note="")
            yield lambda done, note: bar.update(task, completed=done, note=note)
        return
    line = _Line(console, label, total)
    yield line.tick
    line.close()


class _Line:
    """A log line every ``LOG_EVERY_S`` seconds, and one at the end."""

    def __init__(self, console: Console, label: str, total: int) -> None:
        self._console = console
        self._label = label
        self._total = total
        self._started = self._printed = time.monotonic()
        self._last = ""

    def tick(self, done: int, note: str) -> None:
        now = time.monotonic()
        self._last = f"{self._label}: {done}/{self._total} {note} ({now - self._started:.0f} s)"
        if now - self._printed >= LOG_EVERY_S:
            self._printed = now
            self._print()

    def close(self) -> None:
        if self._last:
            self._print()

    def _print(self) -> None:
        self._console.print(self._last, highlight=False, soft_wrap=True)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
        console=console,
    )
