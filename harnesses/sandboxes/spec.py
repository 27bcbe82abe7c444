"""The container that a task asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Network = Literal["session", "allowlist", "public"]
"""``session`` reaches the session's URL and nothing else, ``allowlist`` also HTTP to
``allowed_hosts``, and ``public`` the internet."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A command that succeeds once the container is ready."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    retries: int = 3
    start_period_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """The image, limits and network of one container. A limit of ``None`` is the engine's own."""

    image: str | None = None
    """An image to pull if it is missing. Without it and ``build``, it is ``python:3.11-slim``."""
    build: str | None = None
    """A folder with a Dockerfile, which is built once for its content. It takes precedence over
    ``image``."""
    build_timeout_s: float = 600.0
    workdir: str | None = None
    """Working directory; by default the image's, or else ``/workspace``."""
    user: str | None = None
    """The agent's user; by default the image's."""
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    """Maximum MiB that one session may write to the container's own layer."""
    pids: int = 1024
    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    """Paths of this machine, mounted read-only, by the path in the container."""
    network: Network = "session"
    allowed_hosts: tuple[str, ...] = ()
    health: HealthCheck | None = None
    services: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Services beside the container, which share its network, by name. A definition has the form
    of a compose file's, without variables, and its ``build`` is a folder."""
    volumes: tuple[str, ...] = ()
    """The names of volumes that the services share."""
    hosts: tuple[str, ...] = ()
    """Names that lead to the loopback."""
