"""The verifier that runs a command in the session's sandbox."""

from __future__ import annotations

from dataclasses import dataclass

from bridle.harnesses.sandboxes.base import DirectoryGone, Launch
from bridle.harnesses.verifiers.delivery import REWARD, Delivery, Scores, expected


@dataclass(frozen=True, slots=True)
class CommandVerifier:
    """A verifier that gives 1.0 if a shell command in the workspace exits with 0.

    The command is, for example, a test suite. Without ``command`` it runs ``payload["verify"]``.
    The command's environment contains no provider key. The command and everything that it started
    are killed after ``timeout_s`` seconds, which scores 0. A workspace that the agent has removed
    scores 0, too.
    """

    command: str | None = None
    timeout_s: float = 60.0

    async def __call__(self, delivery: Delivery) -> Scores:
        command = self.command or str(expected(delivery.task, "verify"))
        sandbox = delivery.sandbox
        launch = Launch(
            ("/bin/sh", "-c", command),
            sandbox.place.environment,
            self.timeout_s,
            role="verifier",
            directory=delivery.workspace,
        )
        try:
            finished = await sandbox.exec(launch)
        except DirectoryGone:
            return {REWARD: 0.0}
        return {REWARD: float(finished.exit_code == 0)}
