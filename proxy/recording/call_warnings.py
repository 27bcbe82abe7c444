"""Warnings about calls whose tokens cannot be trained; each cause is logged once and then counted.

An engine that sends contradictory replies does so call after call. One line for each would hide the
rest of the log, and without any the operator would find a store with nothing to train.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from bridle.proxy.periodic import Periodic
from bridle.proxy.recording.logs import log
from bridle.store.call import CallBegun, CallEnded
from bridle.store.records import IDS_MISSING, CallStatus, Note

SUMMARY_S: Final = 60.0
"""Seconds between two summaries."""
_WITHOUT_IDS: Final = Note(IDS_MISSING)

_Cause = tuple[str, str]
"""The name of the engine that replied, and the first word of the reason."""


class CallWarnings:
    """An observer of calls.

    It logs the first quarantined call of each engine and reason, and later the number of those that
    followed, at most one line a cause every :data:`SUMMARY_S`. It also logs, once, that an engine
    sends no token ids, and for each dialect the first call at temperature 0. Metrics count each
    call: ``bridle_calls_total`` by status, and ``bridle_events_total`` by reason.
    """

    def __init__(self) -> None:
        self._since: Counter[_Cause] = Counter()
        """Number of calls of each cause that no line has counted yet."""
        self._total: Counter[_Cause] = Counter()
        self._warned_of_ids = False
        self._greedy_dialects: set[str] = set()
        self._summaries = Periodic("call-warnings", SUMMARY_S, self.summarise)

    def start(self) -> None:
        self._summaries.start()

    async def close(self) -> None:
        await self._summaries.close()
        await self.summarise()

    def observe(self, begun: CallBegun, ended: CallEnded, engine: str | None) -> None:
        if ended.status is CallStatus.QUARANTINED:
            self._quarantined(ended, engine)
        elif _WITHOUT_IDS in ended.notes:
            self._without_ids(ended)
        elif ended.sampler is not None and ended.sampler.temperature == 0:
            self._greedy(begun, ended)

    async def summarise(self) -> None:
        """Log the number of calls of each cause since its last line."""
        since, self._since = self._since, Counter()
        for (engine, reason), calls in since.items():
            fields = {"engine": engine, "reason": reason, "calls": calls}
            total = self._total[engine, reason]
            log.warning("calls_quarantined", extra={**fields, "since_start": total})

    def _quarantined(self, ended: CallEnded, engine: str | None) -> None:
        reason = ended.reason or ""
        cause = (engine or "", reason.partition(":")[0].partition(" ")[0])
        self._total[cause] += 1
        if self._total[cause] > 1:
            self._since[cause] += 1
            return
        log.warning(
            "call_quarantined",
            extra={
                "session": ended.session_id,
                "call": ended.id,
                "engine": engine,
                "reason": reason,
                "meaning": "the reply contradicts itself, so nothing of it is trained; examine "
                "the engine with `bridle doctor --upstream URL`. Further such calls are counted",
            },
        )

    def _greedy(self, begun: CallBegun, ended: CallEnded) -> None:
        """Warn at the first call of a dialect, because a harness samples so in every call."""
        if begun.dialect in self._greedy_dialects:
            return
        self._greedy_dialects.add(begun.dialect)
        log.warning(
            "temperature_zero",
            extra={
                "session": ended.session_id,
                "call": ended.id,
                "meaning": "the client samples at temperature 0: such replies cannot be trained "
                'from rewards. Pin its sessions\' sampling ("settings": {"pin": {"temperature": '
                "1.0}}, or `bridle run --sampling policy`)",
            },
        )

    def _without_ids(self, ended: CallEnded) -> None:
        """Warn once for a process, because every call of such an engine is like the first."""
        if self._warned_of_ids:
            return
        self._warned_of_ids = True
        log.warning(
            "no_token_ids",
            extra={
                "session": ended.session_id,
                "call": ended.id,
                "meaning": "the engine returns text without token ids: nothing of it can be "
                "trained; put the proxy directly in front of vLLM, or start it with --external",
            },
        )
