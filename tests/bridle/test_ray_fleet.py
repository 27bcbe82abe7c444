"""Sessions on Ray: two machines of one cluster, one of which dies, and a training run on them."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.rollout import RolloutResult
from bridle.run.rollouts import rollout
from bridle.store.reading.queries import Reader

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

AGENT = """
import json, os, sys, time, urllib.request
time.sleep(float(sys.argv[2]))
body = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
VERIFIER = "def check(delivery):\n    return float('unknown' in delivery.answer)\n"


@pytest.fixture
def work(tmp_path: Path) -> dict[str, str]:
    """An agent that takes half a second, its tasks and its verifier, by name."""
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "own.py").write_text(VERIFIER)
    lines = [{"id": f"t{n}", "prompt": f"Question {n}?"} for n in range(64)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "agent": f"{sys.executable} {tmp_path / 'agent.py'} {{prompt}} 0.5",
        "tasks": str(tmp_path / "tasks.jsonl"),
        "verifier": f"{tmp_path / 'own.py'}:check",
    }


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two machines of four sessions each; the second may be killed."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    found.second = found.add_node(num_cpus=4)
    yield found
    found.shutdown()


def test_a_killed_machine_costs_its_sessions_one_retry_each(
    cluster: Any, work: dict[str, str], proxy_url: str, store: str, tmp_path: Path
) -> None:
    ended: list[RolloutResult] = []

    def kill_once(result: RolloutResult) -> None:
        ended.append(result)
        if len(ended) == 16:
            kill = threading.Thread(
                target=cluster.remove_node, args=(cluster.second,), kwargs={"allow_graceful": False}
            )
            kill.start()

    results = rollout(
        **work,
        fleet=f"ray:{cluster.address}",
        proxy=proxy_url,
        parallel=8,
        directory=tmp_path / "sessions",
        on_result=kill_once,
    )

    assert Counter(str(result.outcome) for result in results) == {"completed": 64}
    assert {result.task_id for result in results} == {f"t{n}" for n in range(64)}
    lost = [result for result in results if result.attempts == 2]
    assert 1 <= len(lost) <= 4, "what ran on the killed machine, and nothing else"
    with Reader(store) as reader:
        sessions = list(reader.sessions())
        outcomes = Counter(session.outcome for session in sessions)
        assert outcomes == {"completed": 64, "infrastructure": len(lost)}
        retried = {s.labels["retry_of"] for s in sessions if "retry_of" in (s.labels or {})}
        assert retried == {s.id for s in sessions if s.outcome == "infrastructure"}
        completed = [session for session in sessions if session.outcome == "completed"]
        assert len({session.task_id for session in completed}) == 64, "none twice"
        assert all(len(list(reader.rewards(session.id))) == 1 for session in completed)
