"""A circuit breaker that decides whether an engine may be asked, by its latest calls and checks.

A ``closed`` circuit lets every call through. It becomes ``open`` when the engine has failed several
times in a row: no call goes there during a cool-down, which doubles with every trial that fails. It
is ``half_open`` when the cool-down is over or a health check has succeeded: one call may then try
the engine, and its result decides. A reply that breaks off counts as a failure; only a complete
reply resets the count. Failures within one session never open a closed circuit, because that
session's requests may be the cause. An engine that cannot be reached at all fails every session.
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
    """The circuit breaker of one engine.

    Each :meth:`begin` is followed by one of :meth:`answered`, :meth:`failed` and :meth:`abandoned`.
    Each :meth:`answered` is followed by :meth:`succeeded` or :meth:`failed`, unless the client
    left.
    """

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
        """Number of times that it was opened, failed trials not counted."""
        self._limit = failures_to_open
        self._clock = clock
        self.calm = True
        """True if it is closed and nothing has failed since the last success, which is most of the
        time. It then admits calls, and a call that succeeds has nothing to reset."""
        self._failures = 0
        self._sessions: set[str | None] = set()
        """The sessions that met the failures; ``None`` stands for all of them."""
        self._cool_down = COOL_DOWN_S
        self._until: float | None = None
        """The end of the cool-down; ``None`` while closed."""
        self._trial = False

    @property
    def state(self) -> CircuitState:
        if self._until is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if self._clock() < self._until else CircuitState.HALF_OPEN

    @property
    def admits(self) -> bool:
        """Return whether a call may begin now."""
        state = self.state
        return state is CircuitState.CLOSED or (state is CircuitState.HALF_OPEN and not self._trial)

    @property
    def retry_after(self) -> float:
        """Seconds until it may admit a call again."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    def begin(self) -> bool:
        """Record that a call was sent.

        Return True if it is the half-open trial; pass the result to :meth:`failed` or
        :meth:`abandoned`.
        """
        self._trial = self._until is not None
        return self._trial

    def answered(self) -> None:
        """Record that the engine took the call.

        After a cool-down, the next failure opens the circuit again.
        """
        self._failures = min(self._failures, self._limit - 1)
        self._until = None
        self._trial = False

    def succeeded(self) -> None:
        """Record a complete reply."""
        self._failures = 0
        self._sessions.clear()
        self._cool_down = COOL_DOWN_S
        self.calm = self._until is None

    def failed(self, trial: bool = False, session: str | None = None) -> None:
        """Record that the engine could not be reached, or broke off its reply to ``session``."""
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
        """Record that a call ended without evidence about the engine."""
        if trial:
            self._trial = False

    def checked(self, well: bool) -> None:
        """Record the result of a health check.

        A bad one counts as a failed call, or restarts the cool-down if the circuit is not closed. A
        good one lets the next call try.
        """
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
