"""The fleet that a user names: this machine's processes, or Ray."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bridle.errors import UsageError
from bridle.extras import missing_extra
from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.fleet import Fleet, LocalFleet
from bridle.harnesses.tasks.task import Task
from bridle.run.agents import SandboxKind
from bridle.run.agents import agent as named_agent
from bridle.run.agents import verifier as named_verifier


class UnknownFleet(UsageError, ValueError):
    """A fleet is neither ``local`` nor ``ray``, or its package is not installed."""


@dataclass(frozen=True, slots=True)
class NamedParts:
    """A factory that makes, on any machine, the sandboxes and the verifier that a user named on
    another."""

    agent: str
    sandbox: SandboxKind | None
    verifier: str
    folder: Path
    """The folder from which relative names of files start; used on machines that have it."""

    def __call__(self) -> LocalFleet:
        if self.folder.is_dir():
            os.chdir(self.folder)
        _, sandboxes = named_agent(self.agent, self.sandbox)
        return LocalFleet(sandboxes, named_verifier(self.verifier))


def fleet_of(
    named: str,
    agent: str,
    verifier: str,
    tasks: Sequence[Task],
    sandbox: SandboxKind | None = None,
    *,
    cpus: float = 1.0,
) -> tuple[Adapter, Fleet]:
    """Return an adapter and the fleet ``named``: ``local``, ``ray`` or ``ray:ADDRESS``.

    ``agent``, ``sandbox`` and ``verifier`` are as in :mod:`bridle.run.agents`. ``cpus`` is the
    number of cores of a Ray machine that a session takes if its task states none. Raise
    :class:`UnknownFleet`, and the errors of the parts, which are made here first so that a wrong
    name starts nothing.
    """
    adapter, sandboxes = named_agent(agent, sandbox, tasks)
    local = LocalFleet(sandboxes, named_verifier(verifier))
    kind, _, address = named.partition(":")
    if named == "local":
        return adapter, local
    if kind != "ray":
        raise UnknownFleet(f"{named!r} is not a fleet: local, ray, or ray:ADDRESS")
    try:
        from bridle.harnesses.fleet.ray import RayFleet
    except ImportError as error:
        raise UnknownFleet(missing_extra("Ray is missing", "ray", error)) from error
    if sandbox is None and any(task.container for task in tasks):
        sandbox = "container"
    contained = sandbox is not None and sandbox.startswith("container")
    parts = NamedParts(agent, sandbox, verifier, Path.cwd())
    return adapter, RayFleet(parts, address or None, cpus=cpus, containers=contained)
