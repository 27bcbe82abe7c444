"""The health check that a task states for its container."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bridle.harnesses.sandboxes.base import SandboxLost
from bridle.harnesses.sandboxes.container.sandbox import _until_healthy
from bridle.harnesses.sandboxes.spec import ContainerSpec, HealthCheck


@pytest.mark.parametrize(("retries", "checks"), [(0, 1), (1, 1), (2, 2)])
def test_a_container_is_lost_once_its_check_failed_as_often_as_it_may(
    retries: int, checks: int
) -> None:
    launches = []

    async def run(launch: Any) -> SimpleNamespace:
        launches.append(launch)
        return SimpleNamespace(exit_code=1, stderr=SimpleNamespace(tail="it is down"))

    sandbox: Any = SimpleNamespace(place=SimpleNamespace(environment={}), exec=run)
    spec = ContainerSpec(health=HealthCheck("false", interval_s=0, retries=retries))
    with pytest.raises(SandboxLost, match="not healthy: it is down"):
        asyncio.run(_until_healthy(sandbox, spec))
    assert len(launches) == checks
