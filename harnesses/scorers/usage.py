"""``cost``: the calls, tokens and seconds of a session, as penalties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bridle.harnesses.scorers.session import FinishedSession
from bridle.harnesses.verifiers.delivery import Score


@dataclass(frozen=True, slots=True)
class CostOptions:
    call: float = 0.0
    """The cost of a call."""
    token: float = 0.001
    """The cost of a sampled token."""
    prompt_token: float = 0.0
    """The cost of a token of a prompt."""
    second: float = 0.0
    """The cost of a second of the harness's time, for the session as a whole."""


_COST: Final = CostOptions()


async def cost(session: FinishedSession, options: CostOptions = _COST) -> list[Score]:
    """Return minus the session's cost, and that of each turn as ``turn``."""
    turns = [
        Score("turn", -_of(one.prompt_tokens or 0, one.sampled_tokens or 0, options), turn=one.turn)
        for one in session.turns
    ]
    total = sum(one.value for one in turns) - options.second * session.seconds
    counts = {
        "calls": len(session.turns),
        "tokens": sum(one.sampled_tokens or 0 for one in session.turns),
        "prompt_tokens": sum(one.prompt_tokens or 0 for one in session.turns),
        "seconds": session.seconds,
    }
    return [Score("cost", total, detail=counts), *turns]


def _of(prompt: int, sampled: int, options: CostOptions) -> float:
    return options.call + options.token * sampled + options.prompt_token * prompt
