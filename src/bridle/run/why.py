"""``bridle why``: re-entries of a recorded session, and the finding that they support."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from bridle.diagnosis.values import LOST
from bridle.diagnosis.why import Explanation, Tried, Value, explain
from bridle.harnesses.client import Client, Origin
from bridle.run.siblings import Entry, NotReentrant, Recording, Siblings
from bridle.store.records import BESIDE
from bridle.store.reward import FindingMode, Reward, RewardKind


def turns_of(recording: Recording) -> list[Mapping[str, Any]]:
    """Return the calls of a session after which its value is measured."""
    return [call for call in recording.complete() if call.get("kind") not in BESIDE]


def explained(
    recording: Recording,
    siblings: Siblings,
    *,
    succeeded: bool,
    success: float = 1.0,
    per_turn: int = 8,
    budget: int | None = None,
    rules: Mapping[str, Any] | None = None,
    on_batch: Callable[[int, Sequence[Tried]], None] = lambda _turn, _tried: None,
) -> Explanation:
    """Search for the turn that lost a recorded session, by running its siblings.

    ``rules`` are those of :class:`Entry`, the others as :func:`bridle.diagnosis.why.explain` has
    them. ``on_batch`` is called with the turn before each batch of re-entries, and the batch. Raise
    :class:`NotReentrant` for a session without a complete call, and the errors of ``explain``.
    """
    turns = turns_of(recording)
    if not turns:
        raise NotReentrant(f"session {recording.id} has no complete call")

    def enter(after: int, count: int) -> list[Tried]:
        call = turns[after]["id"]
        entry = Entry(Origin(recording.id, call), dict(rules or {}), call)
        with closing(siblings.run(entry, count)) as running:
            tried = [Tried(one.session_id, one.reward, one.error) for one in running]
        on_batch(turns[after - 1]["turn"] if after else 0, tried)
        return tried

    return explain(len(turns), succeeded, enter, success=success, per_turn=per_turn, budget=budget)


def finding(recording: Recording, found: Explanation) -> Reward | None:
    """Return the finding about the turn that lost the session, with its evidence."""
    if found.lost is None:
        return None
    turns = turns_of(recording)
    lost = turns[found.lost.turn - 1]
    return Reward(
        recording.id,
        LOST,
        1.0,
        created_at=0.0,
        call_id=lost["id"],
        turn=lost["turn"],
        kind=RewardKind.FINDING,
        mode=FindingMode.WARN,
        detail={
            "loss": found.lost.loss,
            "interval": list(found.lost.interval),
            "values": [
                _value(turns[after - 1]["turn"] if after else 0, value, found.tried.get(after, ()))
                for after, value in sorted(found.values.items())
            ],
        },
    )


def _value(turn: int, value: Value, tried: Sequence[Tried]) -> dict[str, Any]:
    return {
        "after_turn": turn,
        "chance": value.chance,
        "interval": list(value.interval),
        "re_entries": {one.session_id: one.reward for one in tried if one.session_id},
    }


async def record(client: Client, recording: Recording, found: Explanation) -> bool:
    """Record the finding, if there is one. Return whether there is."""
    about = finding(recording, found)
    if about is not None:
        await client.give(about)
    return about is not None
