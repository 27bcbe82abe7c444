"""``format``: the share of turns that act or answer as their harness can read."""

from __future__ import annotations

import json

from bridle.harnesses.scorers.session import FinishedSession, Turn
from bridle.harnesses.verifiers.delivery import Score


async def form(session: FinishedSession) -> list[Score]:
    """Return 1 or 0 for each turn that was sampled, as ``turn``, and their mean.

    A turn has the value 0 if its reply has neither text nor a tool call, ended at the token limit,
    or has a tool call whose arguments are no JSON object. The mean of no turns is 0.
    """
    sampled = [turn for turn in session.turns if turn.status == "complete"]
    turns = [Score("turn", float(_is_well_formed(one)), turn=one.turn) for one in sampled]
    mean = sum(one.value for one in turns) / len(turns) if turns else 0.0
    return [Score("format", mean), *turns]


def _is_well_formed(turn: Turn) -> bool:
    if turn.finish_reason == "length" or not (turn.text.strip() or turn.tool_calls):
        return False
    return all(_is_object(call["function"].get("arguments")) for call in turn.tool_calls)


def _is_object(arguments: object) -> bool:
    if not isinstance(arguments, str):
        return isinstance(arguments, dict)
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False
