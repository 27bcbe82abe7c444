"""The attacker from inside: a hostile agent in real rollouts changes no reward."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.tasks import Task
from bridle.reconstruct.rewards import Aggregation
from bridle.run.rollouts import rollout
from bridle.store.records import RewardSource

ADMIN = "admin-key-of-the-test-0123456789"
AGENT = Path(__file__).with_name("hostile_agent.py")


@pytest.mark.parametrize("sandbox", ["process", "forked"])
def test_no_way_to_a_reward_works_from_inside_a_rollout(
    lab: Any, tmp_path: Path, sandbox: str
) -> None:
    log = tmp_path / "log"
    log.touch()
    log.chmod(0o666)
    named = f"{sys.executable} {AGENT} {log} {{prompt}}"
    tasks = [Task("one", "What is 2 plus 2?", payload={"answer": "4"})]
    results = rollout(
        named,
        tasks,
        "exact",
        proxy=lab.url,
        key=ADMIN,
        sandbox=sandbox,  # type: ignore[arg-type]
        directory=tmp_path / "sessions",
    )
    (result,) = results
    assert result.scores == {"reward": 0.0}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines, "it did attack"
    assert all(status not in range(200, 300) for line in lines for _, _, status in line)
    time.sleep(4)  # its child waits until the session is sealed
    for line in log.read_text().splitlines():
        assert all(status not in range(200, 300) for _, _, status in json.loads(line)), line
    (reward,) = lab.reader.rewards(result.session_id)
    assert (reward.value, reward.source) == (0.0, RewardSource.VERIFIER)
    assert Aggregation().value([reward]) == 0.0, "training reads what rollout reports"
    assert len(list(lab.reader.sessions())) == 1
