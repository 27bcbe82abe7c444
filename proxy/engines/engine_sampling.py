"""An engine's own sampling, as the engine reports it."""

from __future__ import annotations

from typing import Any, Final, Self

import msgspec

from bridle.engine.contract.contract import NEUTRAL_DEFAULTS, PROCESSED_LOGPROBS
from bridle.store.records import LogprobsOf

_MODES: Final[dict[str, LogprobsOf]] = {PROCESSED_LOGPROBS: "processed", "raw_logprobs": "raw"}


class EngineSampling(msgspec.Struct, frozen=True, gc=False):
    """An engine's own sampling, without the parameters of requests."""

    logprobs: LogprobsOf
    neutral: bool
    """Whether a request that names no parameters gets the policy's own distribution."""

    @classmethod
    def reported(cls, report: Any) -> Self | None:
        """Read the sampling from an engine's JSON. Return ``None`` if the engine does not report
        it."""
        mode = report.get("logprobs_mode") if isinstance(report, dict) else None
        if not isinstance(mode, str):
            return None
        neutral = report.get("generation_config") == NEUTRAL_DEFAULTS
        return cls(_MODES.get(mode, "unknown"), neutral)


UNKNOWN: Final = EngineSampling("unknown", neutral=False)
