"""The fleet that a user names: this machine's processes, Ray, or another."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from bridle.extras import needs_extra
from bridle.harnesses.adapters import ADAPTERS
from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.fleet import Fleet, LocalFleet
from bridle.harnesses.permissions import NO_PERMISSIONS, Permissions
from bridle.harnesses.tasks.task import Task
from bridle.registry import Options, Registry, require_parts
from bridle.run.agents import SANDBOXES, VERIFIERS
from bridle.run.agents import agent as named_agent
from bridle.run.agents import verifier as named_verifier


@dataclass(frozen=True, slots=True)
class NamedParts:
    """A factory that makes on any machine the parts that a user named on another.

    The parts are the sandboxes and the verifier.
    """

    agent: str
    sandbox: str | None
    verifier: str
    folder: Path
    """The folder from which relative names of files start; used on machines that have it."""
    options: Options = field(default_factory=dict, hash=False)
    """The own options of the parts, by name."""
    permissions: Permissions = NO_PERMISSIONS

    def __call__(self) -> LocalFleet:
        if self.folder.is_dir():
            os.chdir(self.folder)
        self.permissions.grant()
        _, sandboxes = named_agent(self.agent, self.sandbox, options=self.options)
        return LocalFleet(sandboxes, named_verifier(self.verifier, self.options))


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """The requirements of a run for its fleet."""

    local: LocalFleet
    """The fleet of this machine, with the sandboxes and the verifier of the run."""
    parts: NamedParts
    """The same parts by name, for other machines. It can be pickled."""
    address: str
    """The text after the fleet's name and a colon, or ``""``."""
    cpus: float
    """Cores for a session whose task states none."""
    containers: bool
    """True if every session takes a container."""


FLEETS: Final[Registry[Callable[[FleetRequest], Fleet]]] = Registry("fleet", "bridle.fleets")
"""The fleets, which are named as ``NAME`` or ``NAME:ADDRESS``. A part is a function that makes
one."""


@FLEETS.registered("local")
def _local(asked: FleetRequest) -> Fleet:
    return asked.local


@FLEETS.registered("ray")
def _ray(asked: FleetRequest) -> Fleet:
    with needs_extra("ray", "Ray is missing"):
        from bridle.harnesses.fleet.ray import RayFleet
    return RayFleet(
        asked.parts, asked.address or None, cpus=asked.cpus, containers=asked.containers
    )


def fleet_of(
    named: str,
    agent: str,
    verifier: str,
    tasks: Sequence[Task],
    sandbox: str | None = None,
    *,
    cpus: float = 1.0,
    options: Options = MappingProxyType({}),
    permissions: Permissions = NO_PERMISSIONS,
) -> tuple[Adapter, Fleet]:
    """Return an adapter and the fleet ``named``, such as ``local``, ``ray`` or ``ray:ADDRESS``.

    ``agent``, ``sandbox`` and ``verifier`` are as in :mod:`bridle.run.agents`. ``cpus`` is the
    number of cores of a Ray machine that a session takes if its task states none. ``options`` are
    the own options of the four parts, by name. ``permissions`` are given on other machines, too.
    Raise :class:`bridle.registry.UnknownPart`, and the errors of the parts, which are made here
    first so that a wrong name starts nothing.
    """
    permissions.grant()
    adapter, sandboxes = named_agent(agent, sandbox, tasks, options)
    local = LocalFleet(sandboxes, named_verifier(verifier, options))
    name, _, address = named.partition(":")
    if name not in FLEETS.names():
        name, address = named, ""
    chosen: dict[Registry[Any], str] = {VERIFIERS: verifier, FLEETS: name}
    chosen[SANDBOXES] = sandbox or "process"
    if "{prompt}" not in agent and not agent.endswith(".py"):
        chosen[ADAPTERS] = agent
    require_parts(options, *chosen.items())
    make = FLEETS.configured(name, options)
    if sandbox is None and any(task.container for task in tasks):
        sandbox = "container"
    contained = sandbox is not None and sandbox.startswith("container")
    parts = NamedParts(agent, sandbox, verifier, Path.cwd(), dict(options), permissions)
    return adapter, make(FleetRequest(local, parts, address, cpus, contained))
