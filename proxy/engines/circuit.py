"""Whether an engine may be asked: a circuit breaker over what its last calls and checks showed.

``closed``: it is asked. ``open``: it failed several times in a row and is left alone for a while,
twice as long after every trial that fails. ``half_open``: that while is over, or a health check
found it well; one call may try it, and whether that is answered decides. A reply that breaks off is
a failure as well: only one that came to its end ends a row of them. Failures that a single session
meets open nothing: its requests may be what the engine fails on, and others must not pay for that.
An engine that cannot be reached at all fails every session.
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
    """Each :meth:`begin` is followed by one of :meth:`answered`, :meth:`failed`,
    :meth:`abandoned`, and an answer by :meth:`succeeded` or :meth:`failed` unless the client was
    the one who left."""

    __slots__ = (
        "_clock",
        "_cool_down",
        "_failures",
        "_limit",
        "_sessions",
        "_trial",
        "_until",
        "calm",
        "openings",
    )

    def __init__(
        self, failures_to_open: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.openings = 0
        """How often it was opened, failed trials not counted."""
        self._limit = failures_to_open
        self._clock = clock
        self.calm = True
        """It is closed and nothing has failed since the last success, which is most of the time:
        it admits calls, and there is nothing to count for one that succeeds."""
        self._failures = 0
        self._sessions: set[str | None] = set()
        """That met the failures; ``None`` stands for all of them."""
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

    def begin(self) -> bool:
        """A call goes to the engine; whether it is the trial, which :meth:`failed` and
        :meth:`abandoned` want to know."""
        self._trial = self._until is not None
        return self._trial

    def answered(self) -> None:
        """The engine took the call. After a cool-down, the next failure opens the circuit again."""
        self._failures = min(self._failures, self._limit - 1)
        self._until = None
        self._trial = False

    def succeeded(self) -> None:
        """The reply is whole."""
        self._failures = 0
        self._sessions.clear()
        self._cool_down = COOL_DOWN_S
        self.calm = self._until is None

    def failed(self, trial: bool = False, session: str | None = None) -> None:
        """The engine could not be reached, or broke off its reply to ``session``."""
        self.calm = False
        if trial:
            self._trial = False
            self._open()
        elif self._until is None:
            self._failures += 1
            self._sessions.add(session)
            alone = len(self._sessions) == 1 and session is not None
            if self._failures >= self._limit and not alone:
                self.openings += 1
                self._open()

    def abandoned(self, trial: bool) -> None:
        """The call ended without telling anything about the engine."""
        if trial:
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

    def _open(self) -> None:
        self.calm = False
        self._until = self._clock() + self._cool_down
        self._cool_down = min(2 * self._cool_down, LONGEST_COOL_DOWN_S)
