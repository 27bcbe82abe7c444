"""Work that begins at once, without a turn of the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any


class Started:
    """An awaitable that has been run up to where it first waits; awaiting it runs the rest.

    What the work raises before it waits is raised by making this.
    """

    __slots__ = ("_steps", "_waits_for", "done")

    def __init__(self, work: Awaitable[None]) -> None:
        self._steps = work.__await__()
        self.done = False
        try:
            self._waits_for = next(self._steps)
        except StopIteration:
            self.done = True

    def __await__(self) -> Generator[Any, None, None]:
        if not self.done:
            # The event loop is given what the work waits for; it has not seen it yet.
            yield self._waits_for
            yield from self._steps
