"""The installed harnesses, unmodified, each in a container of a task's image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridle.bench.shell_policy import ShellPolicy, WorkedThrough
from bridle.harnesses.adapters import CODING_HARNESSES
from bridle.harnesses.client import Client
from bridle.harnesses.episode import Outcome
from bridle.harnesses.rollout import Job, Rollout, RolloutSettings
from bridle.harnesses.sandboxes import ContainerProvider
from bridle.harnesses.verifiers import FunctionVerifier
from bridle.reconstruct.audit import audit_session

pytestmark = pytest.mark.containers

POLICY = ShellPolicy(turns=2)


@pytest.mark.parametrize("name", ["mini-swe-agent", "codex", "claude-code"])
async def test_a_harness_works_in_a_container_and_is_recorded_whole(
    stage: Any, tmp_path: Path, name: str
) -> None:
    bench = stage(POLICY)
    sandboxes = ContainerProvider(name)
    settings = RolloutSettings(tmp_path / "sessions", timeout_s=120, retries=0)

    async with Client(bench.url) as client:
        rollout = Rollout(
            client, CODING_HARNESSES[name](), sandboxes, FunctionVerifier(WorkedThrough()), settings
        )
        (result,) = await rollout.collect([Job(POLICY.task(name))])
        actions = await client.actions(str(result.session_id))
    await sandboxes.close()

    assert (result.outcome, result.scores) == (Outcome.COMPLETED, {"reward": 1.0}), result
    assert len(actions) >= 4, "two commands a turn, as the guards read them"
    audited = audit_session(bench.reader, str(result.session_id), bodies=True)
    assert audited.clean
    assert audited.samples == 1
