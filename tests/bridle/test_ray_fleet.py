"""Sessions on Ray: two machines of one cluster, one of which dies, and a training run on them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.fleet.base import SessionPlan
from bridle.harnesses.fleet.ray import RayFleet
from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.rollout import RolloutResult
from bridle.harnesses.tasks.task import Task
from bridle.run.rollouts import rollout
from bridle.store.reading.queries import Reader
from support.processes import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

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
TWO_TOKENS = '"model": "policy", "max_tokens": 2,'
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


@pytest.fixture(scope="class")
def started() -> Iterator[Any]:
    """A cluster of one machine that runs four sessions; starting it takes longer than any test.

    It ends with the class: a second cluster beside it does not start on one machine.
    """
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 4, "include_dashboard": False}
        found = Cluster(initialize_head=True, head_node_args=head)
        yield found
        found.shutdown()


@pytest.fixture
def cluster(started: Any) -> Iterator[Any]:
    """Two machines of four sessions each; the second may be killed."""
    started.second = started.add_node(num_cpus=4)
    yield started
    if started.second in started.worker_nodes:
        started.remove_node(started.second)


class TestOnTwoMachines:
    def test_a_killed_machine_costs_its_sessions_one_retry_each(
        self, cluster: Any, work: dict[str, str], proxy_url: str, store: str, tmp_path: Path
    ) -> None:
        ended: list[RolloutResult] = []

        def kill_once(result: RolloutResult) -> None:
            ended.append(result)
            if len(ended) == 16:
                kill = threading.Thread(
                    target=cluster.remove_node,
                    args=(cluster.second,),
                    kwargs={"allow_graceful": False},
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

    def test_training_loses_no_step_with_a_machine(
        self, cluster: Any, work: dict[str, str], tmp_path: Path
    ) -> None:
        from bridle.recipes.models.tiny import TinyShape, make_policy
        from bridle.recipes.models.tiny_tokenizer import train_tokenizer

        policy, out = tmp_path / "policy", tmp_path / "out"
        size = train_tokenizer(
            policy, ["Which number is question one? 0123456789"] * 4, vocab_size=320
        )
        shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
        make_policy(policy, shape, vocab_size=size, seed=3)
        (tmp_path / "agent.py").write_text(AGENT.replace('"model": "policy",', TWO_TOKENS))
        argv = [sys.executable, "-m", "bridle", "train", "--policy", policy, "--out", out]
        argv += ["--agent", work["agent"], "--tasks", work["tasks"], "--verifier", work["verifier"]]
        argv += [
            "--set",
            f"agent.fleet=ray:{cluster.address}",
            "--steps",
            "3",
            "--set",
            "groups.per_step=2",
        ]
        argv += ["--set", "groups.size=4", "--set", "agent.parallel=8"]
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as run:
            assert run.stdout is not None
            for line in run.stdout:
                if line.startswith("step 1:"):
                    break
            with Reader(str(out / "bridle.db")) as reader:
                until(lambda: sum(1 for s in reader.sessions() if s.sealed_at is None) == 8, 240)
                time.sleep(0.3)  # they are on their machines
                cluster.remove_node(cluster.second, allow_graceful=False)
            said = run.stdout.read()
        assert run.returncode == 0, said
        assert "after 3 of 3 steps" in said
        with Reader(str(out / "bridle.db")) as reader:
            outcomes = Counter(session.outcome for session in reader.sessions())
        assert outcomes["completed"] == 3 * 2 * 4
        assert set(outcomes) == {"completed", "infrastructure"}
        assert 1 <= outcomes["infrastructure"] <= 4

    def test_what_a_machine_refuses_is_raised_here_and_what_it_cannot_judge_is_a_result(
        self, cluster: Any, work: dict[str, str], proxy_url: str, tmp_path: Path
    ) -> None:
        fleet = {"fleet": f"ray:{cluster.address}", "directory": tmp_path / "sessions"}
        with pytest.raises(NotLaunchable, match="cannot start /nowhere/t"):
            rollout(**work | {"agent": "/nowhere/{task_id} {prompt}"}, proxy=proxy_url, **fleet)
        (tmp_path / "own.py").write_text("def check(delivery):\n    return {}['reward']\n")
        one = Path(work["tasks"])
        one.write_text(one.read_text().splitlines()[0])
        (result,) = rollout(**work, proxy=proxy_url, **fleet)
        assert (result.outcome, result.scores) == ("infrastructure", {})
        assert "KeyError" in result.error


def test_ctrl_c_ends_what_runs_on_a_cluster_of_its_own(
    work: dict[str, str], proxy_url: str, store: str, tmp_path: Path
) -> None:
    argv = [
        sys.executable,
        "-m",
        "bridle",
        "rollout",
        "--set",
        "agent.fleet=ray",
        "--proxy",
        proxy_url,
    ]
    argv += ["--tasks", work["tasks"], "--verifier", work["verifier"]]
    argv += ["--agent", f"sh -c 'touch {tmp_path}/running; exec sleep 60123' {{prompt}}"]
    argv += ["--parallel", "2", "--set", f"agent.directory={tmp_path / 'sessions'}"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as run, Reader(store) as reader:
        until(lambda: (tmp_path / "running").exists(), 240)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=240)
        assert run.returncode == 130, said
        assert {session.outcome for session in reader.sessions()} == {"cancelled"}
    left = subprocess.run(["pgrep", "-xf", "sleep 60123"], capture_output=True, check=False)
    assert not left.stdout, "no agent outlives its rollout"


async def test_a_session_that_is_cancelled_twice_has_ended_when_ray_is_shut_down(
    tmp_path: Path,
) -> None:
    class Slow:
        """A fleet whose sessions take a second to end."""

        async def run(self, plan: Any) -> None:
            (tmp_path / "running").touch()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(1)
                (tmp_path / "ended").touch()
                raise

    fleet = RayFleet(lambda: cast(LocalFleet, Slow()))
    running = asyncio.ensure_future(
        fleet.run(cast(SessionPlan, SimpleNamespace(task=Task("t", ""))))
    )
    await asyncio.to_thread(until, (tmp_path / "running").exists, 240)
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0.1)
    with pytest.raises(asyncio.CancelledError):
        await running
    await fleet.close()
    assert (tmp_path / "ended").exists()


def test_a_client_outside_of_the_cluster_has_its_sessions_run_inside(
    work: dict[str, str], proxy_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    ray = Path(sys.executable).with_name("ray")
    start = ["start", "--head", "--num-cpus=4", "--include-dashboard=false", "--port=6397"]
    start += ["--ray-client-server-port=10001", "--disable-usage-stats"]
    subprocess.run([ray, *start], check=True, capture_output=True)
    try:
        argv = [
            sys.executable,
            "-m",
            "bridle",
            "rollout",
            "--set",
            "agent.fleet=ray:ray://127.0.0.1:10001",
        ]
        argv += ["--proxy", proxy_url, "--agent", work["agent"], "--tasks", work["tasks"]]
        argv += ["--verifier", work["verifier"], "--limit", "4", "--json"]
        argv += ["--set", f"agent.directory={tmp_path / 'sessions'}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    finally:
        subprocess.run([ray, "stop", "--force"], check=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert [result["scores"] for result in json.loads(done.stdout)] == [{"reward": 1.0}] * 4
