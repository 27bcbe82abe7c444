"""The rewards that a verifiers environment gave a session."""

from __future__ import annotations

import math

import msgspec

from bridle.harnesses.tasks.environments.loader import PLAYED
from bridle.harnesses.verifiers.delivery import Delivery, NoVerdict, Scores


class _Played(msgspec.Struct):
    rewards: dict[str, float] | None = None
    errors: list[str] = []


async def rewards_of(delivery: Delivery) -> Scores:
    """Return rewards and metrics by name. Raise :class:`NoVerdict` if the environment gave none."""
    sandbox = delivery.sandbox
    try:
        data = await sandbox.read(sandbox.place.logs / PLAYED)
    except FileNotFoundError as error:
        raise NoVerdict(f"the environment did not end; see {sandbox.directory}") from error
    try:
        played = msgspec.json.decode(data, type=_Played)
    except (ValueError, RecursionError) as error:
        raise NoVerdict(f"the environment's {PLAYED} cannot be read: {error}") from error
    if played.rewards is None:
        raise NoVerdict(f"the environment gave no reward: {'; '.join(played.errors)}")
    for name, value in played.rewards.items():
        if not math.isfinite(value):
            raise NoVerdict(f"the environment's {name} is {value}")
    return played.rewards
