"""``task.toml`` as typed values, and the container that it asks for.

The format is that of harbor 0.26 (``harbor/models/task/config.py``, schema 1.4). Fields that change
nothing here, such as authors, are not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from bridle.harnesses.permissions import TASK_ENV, names_in
from bridle.harnesses.sandboxes.leftovers import read_file
from bridle.harnesses.sandboxes.spec import ContainerSpec, HealthCheck, Network
from bridle.harnesses.tasks.harbor.compose import FILES, MAIN, Compose, read_compose
from bridle.harnesses.tasks.task import TaskError

_TEMPLATE: Final = re.compile(r"\$\{([A-Za-z_]\w*)(?::-(.*))?\}")
TEXT_BYTES: Final = 1 << 20
"""Maximum bytes of a task's instruction and of its ``task.toml``."""
_SIZES: Final = {"K": 1 / 1024, "M": 1, "G": 1024}
_NETWORKS: Final[Mapping[str, Network]] = {
    "no-network": "session",
    "allowlist": "allowlist",
    "public": "public",
}


class Health(msgspec.Struct, frozen=True):
    """The table ``[environment.healthcheck]``."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    retries: int = 3


class EnvironmentTable(msgspec.Struct, frozen=True):
    """The table ``[environment]``, and the verifier's own one."""

    docker_image: str | None = None
    build_timeout_sec: float = 600.0
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: str | None = None
    """The memory limit in the form before schema 1.2, such as ``2G``."""
    storage: str | None = None
    gpus: int | None = None
    env: dict[str, str] = {}
    workdir: str | None = None
    healthcheck: Health | None = None
    network_mode: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allow_internet: bool | None = None
    os: str = "linux"


class AgentTable(msgspec.Struct, frozen=True):
    """The table ``[agent]``."""

    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: tuple[str, ...] = ()


class Collect(msgspec.Struct, frozen=True):
    """An entry of ``[[verifier.collect]]``: a command that runs before artifacts are collected."""

    command: str
    service: str = "main"
    timeout_sec: float = 60.0
    user: str | int | None = None


class VerifierTable(msgspec.Struct, frozen=True):
    """The table ``[verifier]``."""

    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: tuple[Collect, ...] = ()

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        """The stated mode, or else ``separate`` if the verifier has an environment of its own."""
        if self.environment_mode is None and self.environment is not None:
            return "separate"
        return self.environment_mode


class Artifact(msgspec.Struct, frozen=True):
    """A path in the agent's container that a separate verifier receives."""

    source: str


class StepTable(msgspec.Struct, frozen=True):
    """An entry of ``[[steps]]``."""

    name: str
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | dict[str, float] | None = None
    artifacts: tuple[str | Artifact, ...] = ()


class Package(msgspec.Struct, frozen=True):
    """The table ``[task]``."""

    name: str


class SolutionTable(msgspec.Struct, frozen=True):
    """The table ``[solution]``."""

    env: dict[str, str] = {}


class HarborConfig(msgspec.Struct, frozen=True):
    """All parts of ``task.toml`` that decide how a task is run."""

    task: Package | None = None
    environment: EnvironmentTable = EnvironmentTable()
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    solution: SolutionTable = SolutionTable()
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: tuple[StepTable, ...] = ()
    artifacts: tuple[str | Artifact, ...] = ()

    def step(self, name: str | None) -> StepTable | None:
        return next((step for step in self.steps if step.name == name), None)

    def verifier_for(self, step: StepTable | None) -> VerifierTable:
        """Return the step's verifier, with its gaps filled from the task's."""
        whole = self.verifier
        if step is None:
            return whole
        own = step.verifier
        return msgspec.structs.replace(
            own,
            env={**whole.env, **own.env},
            user=whole.user if own.user is None else own.user,
            environment=own.environment or whole.environment,
            environment_mode=own.mode or whole.mode,
            collect=(*whole.collect, *own.collect),
        )


def read_part(folder: Path, file: Path) -> bytes:
    """Return the content of a text file of a task. Raise :class:`TaskError`.

    The file is a regular one of at most :data:`TEXT_BYTES`, and no link leads out of ``folder``.
    """
    try:
        return read_file(folder, file, TEXT_BYTES)
    except FileNotFoundError as error:
        raise TaskError(
            f"{file} is no file of the task with at most {TEXT_BYTES >> 20} MiB"
        ) from error


def read_config(folder: Path) -> HarborConfig:
    """Read the ``task.toml`` of a task's folder. Raise :class:`TaskError`."""
    file = folder / "task.toml"
    data = read_part(folder, file)
    try:
        config = msgspec.toml.decode(data, type=HarborConfig, strict=False)
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise TaskError(f"{file}: {error}") from error
    if config.environment.os.lower() != "linux":
        raise TaskError(f"{file}: environment.os is {config.environment.os}; only linux is run")
    tables = (config.verifier, *(step.verifier for step in config.steps))
    if any(hook.service != MAIN for table in tables for hook in table.collect):
        raise TaskError(f"{file}: a hook of [[verifier.collect]] runs in another service than main")
    return config


def container_of(folder: Path, table: EnvironmentTable, agent: AgentTable) -> ContainerSpec:
    """Return the container of an environment whose build folder, if it has one, is ``folder``.

    Raise :class:`TaskError`.
    """
    named = next((folder / name for name in FILES if (folder / name).exists()), None)
    compose = Compose()
    if named is not None:
        compose = read_compose(folder, read_part(folder, named), resolved)
    image = table.docker_image or compose.image
    builds = not image and (folder / "Dockerfile").is_file()
    if not builds and not image:
        raise TaskError(f"{folder} has no Dockerfile, and task.toml names no docker_image")
    network, hosts = _network(table, agent)
    health = table.healthcheck
    return ContainerSpec(
        image=image,
        build=str(folder) if builds else None,
        build_timeout_s=table.build_timeout_sec,
        workdir=table.workdir,
        user=None if agent.user is None else str(agent.user),
        cpus=table.cpus,
        memory_mb=table.memory_mb or _megabytes(table.memory),
        storage_mb=table.storage_mb or _megabytes(table.storage),
        gpus=table.gpus or 0,
        environment={**compose.environment, **resolved(table.env)},
        services=compose.services,
        volumes=compose.volumes,
        hosts=compose.hosts,
        network=network,
        allowed_hosts=hosts,
        health=None
        if health is None
        else HealthCheck(
            health.command,
            health.interval_sec,
            health.timeout_sec,
            health.retries,
            health.start_period_sec,
        ),
    )


def resolved(environment: Mapping[str, str]) -> dict[str, str]:
    """Replace ``${VAR}`` and ``${VAR:-default}`` by values from this process's environment.

    Only variables that the user permits are read (:mod:`bridle.harnesses.permissions`). Raise
    :class:`TaskError` for another one, and for one that is not set, unless there is a default.
    """
    permitted = names_in(TASK_ENV)
    found = {}
    for name, value in environment.items():
        match = _TEMPLATE.fullmatch(value)
        if match is None:
            found[name] = value
            continue
        wanted = match[1]
        given = os.environ.get(wanted, match[2]) if wanted in permitted else match[2]
        if given is None and wanted in permitted:
            raise TaskError(f"the task takes {name} from ${wanted}, which is not set")
        if given is None:
            raise TaskError(
                f"the task takes {name} from ${wanted}, which no task may read unless you permit "
                f"it: --set 'tasks.env=[\"{wanted}\"]'"
            )
        found[name] = given
    return found


def thresholds(value: float | dict[str, float] | None) -> dict[str, float]:
    """Return the rewards that a step must reach, by name; a single number is for ``reward``."""
    if value is None:
        return {}
    return dict(value) if isinstance(value, dict) else {"reward": float(value)}


def sources(entries: tuple[str | Artifact, ...]) -> list[str]:
    """Return the paths in the container from which artifacts are taken."""
    return [entry if isinstance(entry, str) else entry.source for entry in entries]


def _network(table: EnvironmentTable, agent: AgentTable) -> tuple[Network, tuple[str, ...]]:
    """Return the network as Harbor chooses it.

    It is the agent's own policy, else the environment's, else public.
    """
    mode, hosts = agent.network_mode, agent.allowed_hosts
    if mode is None:
        mode, hosts = table.network_mode, table.allowed_hosts
    if mode is None and table.allow_internet is not None:
        mode = "public" if table.allow_internet else "no-network"
    if mode not in (None, *_NETWORKS):
        raise TaskError(f"network_mode {mode!r} is not one of {', '.join(_NETWORKS)}")
    return _NETWORKS[mode or "public"], hosts


def _megabytes(size: str | None) -> int | None:
    if size is None:
        return None
    text = size.strip().upper()
    try:
        return int(float(text[:-1]) * _SIZES[text[-1]])
    except (KeyError, ValueError, IndexError) as error:
        raise TaskError(f"{size!r} is no size such as 2G or 512M") from error


def payload_of(folder: Path) -> dict[str, Any]:
    """Return the payload by which a task's verifier finds its folder."""
    return {"harbor": str(folder)}
