"""From a request and an engine's way of sampling to the sampler of a call."""

from __future__ import annotations

from typing import Any, Final, Self

import msgspec

from bridle.engine.contract.contract import NEUTRAL_DEFAULTS, PROCESSED_LOGPROBS
from bridle.proxy.engines.request import EngineRequest
from bridle.store.records import SAMPLER_PARAMETERS, LogprobsOf, Sampler

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


def sampler_of(request: EngineRequest, engine: EngineSampling) -> Sampler:
    """What the reply to ``request`` is drawn from."""
    asked = request.sampling
    values: dict[str, Any] = {}
    for name in SAMPLER_PARAMETERS:
        value = asked.get(name)
        if value is not None:
            values[name] = max(value, 0) if name == "top_k" else value
        elif not engine.neutral:
            values[name] = None
    return Sampler(engine.logprobs, grammar=request.grammar, others=request.reshaping, **values)
