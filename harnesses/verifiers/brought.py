"""The verifier that a task itself brings."""

from __future__ import annotations

from dataclasses import dataclass

from bridle.harnesses.verifiers import CommandVerifier, Delivery, TaskUnfit, Verdict
from bridle.harnesses.verifiers.environments import rewards_of
from bridle.harnesses.verifiers.harbor import HarborVerifier


@dataclass(frozen=True, slots=True)
class TaskVerifier:
    """A verifier that uses the tests, the rewards or the command that a task brings.

    The tests are of a Harbor folder, the rewards of an environment, and the command is in
    ``payload["verify"]``.
    """

    async def __call__(self, delivery: Delivery) -> Verdict:
        payload = delivery.task.payload
        if "harbor" in payload:
            return await HarborVerifier()(delivery)
        if "verifiers" in payload:
            return await rewards_of(delivery)
        if "verify" in payload:
            return await CommandVerifier()(delivery)
        raise TaskUnfit("the task brings no verifier of its own: name one by --verifier")
