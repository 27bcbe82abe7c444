"""The distribution from which the policy's tokens are drawn in the sessions of a run.

A token is trained against the distribution from which it was drawn. The policy's own distribution
is the robust choice, so sessions of a run are pinned to it, whatever their harness asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bridle.errors import UsageError

OWN_DISTRIBUTION: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""The parameters that draw tokens from the policy's own distribution."""
POLICY: Final = "policy"
AGENT: Final = "agent"


def session_settings(sampling: str) -> Mapping[str, Any]:
    """Return the settings of a run's sessions.

    ``sampling`` is ``policy`` (the policy's own distribution), ``agent`` (the harness's
    parameters), or parameters that differ from the policy's own, such as
    ``temperature=0.7,top_p=0.8``. Raise :class:`bridle.errors.UsageError`.
    """
    if sampling == AGENT:
        return {}
    pins = dict(OWN_DISTRIBUTION)
    for part in () if sampling == POLICY else sampling.split(","):
        name, _, value = part.partition("=")
        try:
            if name.strip() not in pins:
                raise ValueError
            pins[name.strip()] = int(value) if name.strip() == "top_k" else float(value)
        except ValueError:
            raise UsageError(
                f"agent.sampling {sampling!r} is neither policy, agent, nor a list such as "
                f"temperature=0.7,top_p=0.8 (of {', '.join(OWN_DISTRIBUTION)})"
            ) from None
    return {"pin": pins}
