"""A fleet for sessions as Ray tasks, on any number of machines.

Each session is one Ray task. It takes the cores, the memory and the GPUs that its task states, and
one ``container`` if it needs one: ``ray start --resources='{"container": 16}'`` declares how many a
machine runs. Ray retries nothing. The Ray task of a machine that died raises
:class:`~bridle.harnesses.sandboxes.base.SandboxLost`, and the rollout runner retries the session. A
process of a machine makes its parts once and keeps them warm for its next sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import ray
import ray.exceptions

from bridle.errors import BridleError
from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.episode import EpisodeResult
from bridle.harnesses.fleet.base import SessionPlan
from bridle.harnesses.fleet.local import LocalFleet
from bridle.harnesses.sandboxes.base import SandboxLost
from bridle.harnesses.tasks.task import Task

CONTAINER: Final = "container"
"""The Ray resource of which every session in a container takes one."""
_CANCEL_S: Final = 15.0
"""Maximum seconds to wait for the end of a cancelled session."""


class NoRay(BridleError):
    """There is no Ray at the address that was given."""

    retryable = True


class RayFleet:
    """A fleet that runs plans on the machines of a Ray cluster; one per process."""

    overlap = 1

    def __init__(
        self,
        make: Callable[[], LocalFleet],
        address: str | None = None,
        *,
        cpus: float = 1.0,
        containers: bool = False,
    ) -> None:
        """Connect to a cluster, or start one.

        ``make`` is pickled, must be hashable, and is called once in each process that runs
        sessions. ``address`` is that of ``ray.init``: ``HOST:PORT``, ``ray://HOST:PORT`` or
        ``auto``; without it a cluster of this machine alone is started. ``cpus`` is the number of
        cores for a session whose task states none. With ``containers``, every session takes a
        container. Raise :class:`NoRay`.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own = {} if address else {"resources": {CONTAINER: float(os.cpu_count() or 1)}}
        if address is None:
            own["include_dashboard"] = False  # type: ignore[assignment]
        try:
            ray.init(address or "local", log_to_driver=False, logging_level="error", **own)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise NoRay(
                f"no Ray answers at {address or 'this machine'}: {error}. Is `ray start` running, "
                "and is RAY_AUTH_MODE here as there?"
            ) from error
        self._make, self._cpus, self._containers = make, cpus, containers
        self._run = ray.remote(_run)
        self._ending: set[asyncio.Future[None]] = set()
        """The waits for cancelled sessions. A wait goes on even if its caller is cancelled
        again."""
        self.host = _own_address(address)

    def require_launchable(self, adapter: Adapter, task: Task, directory: Path, model: str) -> None:
        """Accept every task.

        Only the machine that runs a session knows its installed harnesses.
        """

    async def run(self, plan: SessionPlan) -> EpisodeResult:
        running = self._run.options(max_retries=0, **self._needs(plan.task)).remote(
            self._make, plan
        )
        asked = time.monotonic()
        try:
            result = cast(EpisodeResult, await asyncio.wrap_future(running.future()))
        except asyncio.CancelledError:
            ending = asyncio.ensure_future(asyncio.to_thread(_end, running))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.shield(ending)
            raise
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, BridleError):
                raise error.cause from error
            raise
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[0]
            raise SandboxLost(f"the machine of session {plan.session.id} is gone: {why}") from error

        waited = time.monotonic() - asked - sum(result.stages.values())
        return replace(result, stages={**result.stages, "wait": max(0.0, waited)})

    async def close(self) -> None:
        # Ray ends a thread that still waits for a task when it is shut down.
        await asyncio.gather(*self._ending)
        await asyncio.to_thread(ray.shutdown)

    def _needs(self, task: Task) -> dict[str, Any]:
        asked = task.container
        contained = self._containers or asked is not None
        return {
            "num_cpus": asked.cpus if asked and asked.cpus else self._cpus,
            "memory": asked.memory_mb * 2**20 if asked and asked.memory_mb else None,
            "num_gpus": asked.gpus if asked else 0,
            "resources": {CONTAINER: 1} if contained else None,
        }


def _end(running: Any) -> None:
    ray.cancel(running)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.wait([running], timeout=_CANCEL_S)


def _own_address(address: str | None) -> str:
    """Return this machine's address on the network of the cluster's head."""
    if address is None:
        return "127.0.0.1"
    if not address.startswith("ray://"):
        address = f"ray://{ray.get_runtime_context().gcs_address}"
    head = urlsplit(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((head.hostname, head.port or 1))
        return str(probe.getsockname()[0])


class _Machine:
    """The parts of one process on a machine of the cluster, and their event loop."""

    def __init__(self, make: Callable[[], LocalFleet]) -> None:
        self.fleet = make()
        self.runner = asyncio.Runner()


_machine = functools.cache(_Machine)


def _run(make: Callable[[], LocalFleet], plan: SessionPlan) -> EpisodeResult:
    """Run a plan as the Ray task. When cancelled, end the session before raising."""
    machine = _machine(make)
    try:
        return machine.runner.run(machine.fleet.run(plan))
    except KeyboardInterrupt:
        # As itself it would end the event loop that waits for this task.
        raise SandboxLost("the session was cancelled") from None
