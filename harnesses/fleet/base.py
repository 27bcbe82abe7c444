"""The protocol of fleets: start a session's plan, get its result, cancel it.

A fleet runs the harness and the verifier, nothing else. Opening a session, its rewards and its seal
stay with :mod:`bridle.harnesses.rollout`, so that whatever becomes of a machine of the fleet, the
store holds one result of each session. A machine gets the keys of its sessions, never the admin
key.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.client import Session
from bridle.harnesses.episode import EpisodeResult
from bridle.harnesses.tasks.task import Task


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """One session that is to be run. It can be pickled, and holds no key that scores."""

    task: Task
    adapter: Adapter
    session: Session
    """Recorded by the proxy; its URLs are reachable from every machine of the fleet."""
    model: str
    timeout_s: float
    """Of the harness, for a task that states no time of its own."""
    directory: Path
    """Absolute, of the machine that runs the session; receives its folder."""
    parallel: int = 0
    """How many sessions of this machine may be in one stage at a time; 0: any number."""
    hidden: tuple[Path, ...] = ()
    """Files and folders that the session may not see, where the machine has them."""
    keep_directory: bool = False
    """Whether the folder of a session that completed stays."""


class Fleet(Protocol):
    """Runs sessions, any number at a time."""

    overlap: int
    """How many sessions to start for each that may run at a time: others are prepared and verified
    meanwhile."""

    @property
    def host(self) -> str:
        """This machine's address, as the fleet's machines reach it."""

    def require_launchable(self, adapter: Adapter, task: Task, directory: Path, model: str) -> None:
        """Raises what is known before there is a session, such as ``NotLaunchable``."""

    async def run(self, plan: SessionPlan) -> EpisodeResult:
        """Runs the plan to its end. Cancelling ends the session and everything that it started.

        Raises ``SandboxLost`` when its machine or its sandbox is gone, ``LaunchRefused``,
        ``NotLaunchable``, and ``VerifierError``.
        """

    async def close(self) -> None:
        """Ends what is kept warm between sessions."""
