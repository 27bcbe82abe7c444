"""The protocol of fleets, which start a session's plan, return its result, and can cancel it.

A fleet runs the harness and the verifier, nothing else. :mod:`bridle.harnesses.rollout` opens,
rewards and seals a session, so that the store has one result of each session whatever happens to a
machine of the fleet. A machine receives the keys of its sessions, never the admin key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.client import Session
from bridle.harnesses.episode import EpisodeResult
from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """The plan of one session to run. It can be pickled, and has no key that scores."""

    task: Task
    adapter: Adapter
    session: Session
    """The session as the proxy recorded it. Its URLs are reachable from every machine of the
    fleet."""
    model: str
    timeout_s: float
    """The time limit of the harness, for a task that states none."""
    directory: Path
    """The absolute folder, on the machine that runs the session, that receives the session's
    folder."""
    parallel: int = 0
    """Maximum sessions of this machine in one stage at a time, or 0 for any number."""
    hidden: tuple[Path, ...] = ()
    """Files and folders that the session may not see, if they exist on the machine."""
    bounds: Bounds = field(default_factory=Bounds)
    """The bounds of the session's processes."""
    keep_directory: bool = False
    """True if the folder of a completed session is kept."""
    artefacts: tuple[str, ...] = ()
    """Files of the workspace that the result has, if the agent left them."""
    seen_as: Path | None = None
    """The path under which the session sees its folder, where it has walls; ``None`` stands for the
    folder's own path."""


class Fleet(Protocol):
    """A runner of sessions, any number at a time."""

    overlap: int
    """Number of sessions to start for each that may run at a time, because others are prepared and
    verified meanwhile."""

    @property
    def host(self) -> str:
        """The address at which the fleet's machines reach this machine."""

    def require_launchable(self, adapter: Adapter, task: Task, directory: Path, model: str) -> None:
        """Raise the errors that are known before there is a session, such as ``NotLaunchable``."""

    async def run(self, plan: SessionPlan) -> EpisodeResult:
        """Run the plan to its end. Cancelling ends the session and everything that it started.

        Raise ``SandboxLost`` if its machine or its sandbox is gone, ``LaunchRefused``,
        ``NotLaunchable``, or ``VerifierError``.
        """

    async def close(self) -> None:
        """End everything that is kept warm between sessions."""
