"""The rewards that a verifiers environment gave a session."""

from __future__ import annotations

import json

from bridle.harnesses.tasks.environments.loader import PLAYED
from bridle.harnesses.verifiers import Delivery, NoVerdict, Scores


async def rewards_of(delivery: Delivery) -> Scores:
    """Rewards and metrics by name. Raises :class:`NoVerdict` when the environment gave none."""
    sandbox = delivery.sandbox
    try:
        played = json.loads(await sandbox.read(sandbox.place.logs / PLAYED))
    except FileNotFoundError as error:
        raise NoVerdict(f"the environment did not end; see {sandbox.directory}") from error
    if "rewards" not in played:
        raise NoVerdict(f"the environment gave no reward: {'; '.join(played['errors'])}")
    return {name: float(value) for name, value in played["rewards"].items()}
