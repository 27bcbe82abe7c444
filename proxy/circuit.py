"""Whether an engine may be asked: a circuit breaker over what its last calls and checks showed.

``closed``: it is asked. ``open``: it failed several times in a row and is left alone for a while,
twice as long after every trial that fails. ``half_open``: that while is over, or a health check
found it well; one call may try it, and its outcome decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final

COOL_DOWN_S: Final = 1.0
LONGEST_COOL_DOWN_S: Final = 30.0


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Circuit:
    """Pair each :meth:`begin` with one of :meth:`succeeded`, :meth:`failed`, :meth:`abandoned`."""

    def __init__(
        self, failures_to_open: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.openings = 0
        """How often it was opened, failed trials not counted."""
        self._limit = failures_to_open
        self._clock = clock
        self._failures = 0
        self._cool_down = COOL_DOWN_S
        self._until: float | None = None
        """End of the cool-down; ``None`` while closed."""
        self._trial = False

    @property
    def state(self) -> CircuitState:
        if self._until is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if self._clock() < self._until else CircuitState.HALF_OPEN

    @property
    def admits(self) -> bool:
        """Whether a call may begin now."""
        state = self.state
        return state is CircuitState.CLOSED or (state is CircuitState.HALF_OPEN and not self._trial)

    @property
    def retry_after(self) -> float:
        """Seconds until it may admit a call again."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    def begin(self) -> None:
        """A call goes to the engine."""
        if self._until is not None:
            self._trial = True

    def succeeded(self) -> None:
        self._failures = 0
        self._cool_down = COOL_DOWN_S
        self._until = None
        self._trial = False

    def failed(self) -> None:
        self._trial = False
        if self._until is not None:
            self._cool_down = min(2 * self._cool_down, LONGEST_COOL_DOWN_S)
            self._until = self._clock() + self._cool_down
            return
        self._failures += 1
        if self._failures >= self._limit:
            self.openings += 1
            self._until = self._clock() + self._cool_down

    def abandoned(self) -> None:
        """The call ended without telling anything about the engine."""
        self._trial = False

    def checked(self, well: bool) -> None:
        """A health check's verdict: bad ones eject as failed calls do and keep ejected; a good one
        lets the next call try."""
        if self._until is None:
            if not well:
                self.failed()
        elif well:
            self._until = min(self._until, self._clock())
        else:
            self._until = self._clock() + self._cool_down
