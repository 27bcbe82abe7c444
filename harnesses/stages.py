"""The stages of a session, which overlap those of other sessions, and the time that each takes.

A session is prepared, run, verified and cleaned up. Each of the first three stages has as many
slots as sessions may run at a time, so that some sandboxes are opened and some answers verified
while other sessions run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Literal

Stage = Literal["prepare", "run", "verify", "clean"]
STAGES: Final[tuple[Stage, ...]] = ("prepare", "run", "verify")
"""The stages that have slots."""
NAMES: Final[Mapping[str, str]] = {
    "prepare": "preparing",
    "run": "running",
    "verify": "verifying",
    "clean": "cleaning up",
    "wait": "waiting",
}


class StageSlots:
    """The slots of each stage: ``count`` for each, or any number if it is ``None``."""

    def __init__(self, count: int | None = None) -> None:
        self._free = {name: asyncio.Semaphore(count) for name in STAGES} if count else {}

    def of(self, stage: Stage) -> asyncio.Semaphore | nullcontext[None]:
        return self._free.get(stage) or nullcontext()


class StageClock:
    """The stages of one session."""

    def __init__(self, slots: StageSlots) -> None:
        self._slots = slots
        self.seconds: dict[str, float] = {}
        """Seconds by stage; ``wait`` is the time until slots were free."""

    @asynccontextmanager
    async def stage(self, name: Stage) -> AsyncIterator[None]:
        """Wait for a slot of the stage, and hold it while the context is open."""
        asked = time.monotonic()
        async with self._slots.of(name):
            began = time.monotonic()
            self._add("wait", began - asked)
            try:
                yield
            finally:
                self._add(name, time.monotonic() - began)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class Throughput:
    """The throughput of sessions, and the stage that limits it."""

    per_hour: float
    overlap: float
    """Seconds of all stages divided by those of all slots of one stage. This is the gain over one
    stage at a time."""
    busy: Mapping[str, float]
    """Share of a stage's slots that were taken, by stage."""

    @classmethod
    def of(
        cls, sessions: Iterable[Mapping[str, float]], seconds: float, parallel: int
    ) -> Throughput:
        """Return the throughput of ``sessions``, which are seconds by stage.

        They took ``seconds`` in all, with ``parallel`` slots per stage.
        """
        found = list(sessions)
        spent: dict[str, float] = {
            name: sum(one.get(name, 0.0) for one in found) for name in (*STAGES, "clean")
        }
        slots = max(seconds, 1e-9) * parallel
        busy: dict[str, float] = {name: spent[name] / slots for name in STAGES}
        return cls(3600 * len(found) / max(seconds, 1e-9), sum(spent.values()) / slots, busy)

    def __str__(self) -> str:
        shares = ", ".join(f"{NAMES[name]} {share:.0%}" for name, share in self.busy.items())
        bound = max(self.busy, key=lambda name: self.busy[name])
        return (
            f"{self.per_hour:.0f} sessions/h, bounded by {NAMES[bound]} (slots taken: {shares}); "
            f"{self.overlap:.1f} times one stage at a time"
        )
