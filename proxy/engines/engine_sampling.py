"""How an engine samples, as it reports it."""

from __future__ import annotations

from typing import Any, Final, Self

import msgspec

from bridle.engine.contract.contract import NEUTRAL_DEFAULTS, PROCESSED_LOGPROBS
from bridle.store.records import LogprobsOf

_MODES: Final[dict[str, LogprobsOf]] = {PROCESSED_LOGPROBS: "processed", "raw_logprobs": "raw"}


class EngineSampling(msgspec.Struct, frozen=True, gc=False):
    """How an engine samples, apart from what requests ask for."""

    logprobs: LogprobsOf
    neutral: bool
    """Whether a request that names no parameters gets the policy's own distribution."""

    @classmethod
    def reported(cls, report: Any) -> Self | None:
        """From an engine's JSON; ``None`` when it does not report it."""
        mode = report.get("logprobs_mode") if isinstance(report, dict) else None
        if not isinstance(mode, str):
            return None
        neutral = report.get("generation_config") == NEUTRAL_DEFAULTS
        return cls(_MODES.get(mode, "unknown"), neutral)


UNKNOWN: Final = EngineSampling("unknown", neutral=False)
