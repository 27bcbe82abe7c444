"""Harbor's format: the solution scores 1, an idle agent 0, a missing reward is an error."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridle.bench.shell_policy import SHELLS, SUBMIT, ShellPolicy
from bridle.engine.scripted import ScriptedCall, ScriptedReply, ScriptedRequest
from bridle.harnesses.episode import Outcome
from bridle.harnesses.rollout import RolloutResult
from bridle.run.examples import example_directory
from bridle.run.rollouts import rollout

pytestmark = pytest.mark.containers

_PATH = Path(__file__).with_name("harbor_folders.py")
_spec = importlib.util.spec_from_file_location("harbor_folders", _PATH)
assert _spec is not None
assert _spec.loader is not None
folders = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = folders
_spec.loader.exec_module(folders)

NOTHING = "true {prompt}"
ENDED_BY = {"codex": {"server-that-stays"}}
"""Tasks that a harness cannot solve by their solutions. When a command has ended, Codex kills what
it left in its process group; in the same sandbox the server outlives the other harnesses."""


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("harbor")
    folders.write_all(root)
    return root


def run(stage: Any, tmp_path: Path, agent: str, tasks: Path, **options: Any) -> list[RolloutResult]:
    bench = stage(ShellPolicy(turns=1))
    return rollout(
        agent, f"harbor:{tasks}", "task", proxy=bench.url, directory=tmp_path / "runs", **options
    )


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), (NOTHING, 0.0)])
def test_every_task_pays_its_solution_and_nothing_else(
    stage: Any, tmp_path: Path, twenty: Path, agent: str, reward: float
) -> None:
    results = run(stage, tmp_path, agent, twenty)

    assert len(results) == 20
    got = {result.task_id: (result.error, result.scores.get("reward")) for result in results}
    assert got == {result.task_id: ("", reward) for result in results}


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), (NOTHING, 0.0)])
def test_the_example_pays_its_solution_and_nothing_else(
    stage: Any, tmp_path: Path, agent: str, reward: float
) -> None:
    (result,) = run(stage, tmp_path, agent, example_directory("harbor_task"))

    assert (result.error, result.scores) == ("", {"reward": reward})


def test_rewards_have_their_names_and_steps_their_mean(
    stage: Any, tmp_path: Path, twenty: Path
) -> None:
    (named,) = run(stage, tmp_path, "oracle", twenty / "rewards-by-name")
    assert named.scores == {"reward": 1.0, "style": 0.5}

    half = "sh -c 'echo one > /app/one' {prompt}"
    (mean,) = run(stage, tmp_path, half, twenty / "steps-mean")
    assert mean.scores == {"reward": 0.5}


def test_a_step_below_its_least_reward_ends_the_session(
    stage: Any, tmp_path: Path, twenty: Path
) -> None:
    only_second = "sh -c 'echo two > /app/two; echo run >> /app/runs; cat /app/runs' {prompt}"

    (result,) = run(stage, tmp_path, only_second, twenty / "steps-final")

    assert result.scores == {"reward": 0.0}
    assert result.answer == "run", "the second step was not run"


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("true", "no reward file"),
        (": > /logs/verifier/reward.txt", "an empty reward.txt"),
        ("echo nan > /logs/verifier/reward.txt", "no finite number"),
        ('echo \'{"reward": "1"}\' > /logs/verifier/reward.json', "no finite number"),
        ("sleep 60", "took more than 2 s"),
    ],
)
def test_tests_without_a_reward_give_no_score_and_are_not_run_again(
    stage: Any, tmp_path: Path, tests: str, why: str
) -> None:
    folders.folder(
        tmp_path / "tasks",
        "unfit",
        config=folders.CLOSED + "[verifier]\ntimeout_sec = 2\n",
        files={"tests/test.sh": f"#!/bin/bash\n{tests}\n"},
    )

    (result,) = run(stage, tmp_path, NOTHING, tmp_path / "tasks")

    assert (result.outcome, result.attempts) == (Outcome.INFRASTRUCTURE, 1)
    assert why in result.error
    assert result.scores == {}


def test_an_old_reward_of_the_agents_is_not_read(stage: Any, tmp_path: Path) -> None:
    folders.folder(tmp_path / "tasks", "cheat", files={"tests/test.sh": "#!/bin/bash\ntrue\n"})
    cheat = "sh -c 'mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt' {prompt}"

    (result,) = run(stage, tmp_path, cheat, tmp_path / "tasks")

    assert result.outcome is Outcome.INFRASTRUCTURE
    assert "no reward file" in result.error


def test_an_agent_out_of_time_is_verified_on_what_it_left(stage: Any, tmp_path: Path) -> None:
    config = folders.CLOSED + "[agent]\ntimeout_sec = 2\n"
    folders.folder(tmp_path / "tasks", "slow", config=config)
    slow = "sh -c 'echo line of slow > /app/out.txt; sleep 60' {prompt}"

    (result,) = run(stage, tmp_path, slow, tmp_path / "tasks")

    assert (result.outcome, result.scores) == (Outcome.TIMEOUT, {"reward": 1.0})


@dataclass(frozen=True)
class Solving:
    """Runs the task's solution in any harness's shell, then ends; or ends at once."""

    scripts: Mapping[str, str]
    """The solutions, by the line that the task asks for."""
    idle: bool = False

    def __call__(self, request: ScriptedRequest) -> ScriptedReply:
        names = {tool["function"]["name"] for tool in request.tools}
        shell = next((name for name in SHELLS if name in names), None)
        if shell is None:
            return ScriptedReply("A side remark.")
        text = json.dumps(request.messages)
        asked = re.findall(r"Write '([^']*)' into", text)[-1]
        worked = any(message["role"] == "tool" for message in request.messages)
        if not (worked or self.idle):
            return self._running(shell, self.scripts[asked])
        if SUBMIT in text:
            return self._running(shell, f"echo {SUBMIT} && echo done")
        return ScriptedReply("It is done.")

    def _running(self, shell: str, command: str) -> ScriptedReply:
        return ScriptedReply(tool_calls=(ScriptedCall(shell, SHELLS[shell](command)),))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("agent", "reward"),
    [("codex", 1.0), ("mini-swe-agent", 1.0), ("claude-code", 1.0), ("mini-swe-agent", 0.0)],
)
@pytest.mark.sampled(4)
def test_a_harness_that_runs_the_solution_gets_what_the_oracle_gets(
    stage: Any, tmp_path: Path, twenty: Path, agent: str, reward: float
) -> None:
    scripts = {}
    for file in twenty.glob("**/instruction.md"):
        (line,) = re.findall(r"Write '([^']*)' into", file.read_text())
        # The variables of a solution are the oracle's alone.
        solution = (file.parent / "solution/solve.sh").read_text()
        scripts[line] = solution.replace('"$LINE"', f"'{line}'")
    bench = stage(Solving(scripts, idle=not reward))

    results = rollout(
        agent, f"harbor:{twenty}", "task", proxy=bench.url, directory=tmp_path / "runs", parallel=2
    )

    got = {each.task_id: (each.outcome, each.error, each.scores.get("reward")) for each in results}
    rewards = {path.name: reward for path in twenty.iterdir()}
    rewards |= dict.fromkeys(ENDED_BY.get(agent, ()), 0.0)
    assert got == {name: (Outcome.COMPLETED, "", each) for name, each in rewards.items()}


@pytest.mark.skipif("BRIDLE_HARBOR" not in os.environ, reason="BRIDLE_HARBOR names no harbor")
@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_harbor_itself_gives_the_same_rewards(tmp_path: Path, agent: str, reward: float) -> None:
    """Its Docker runtime closes no network in every engine, so the tasks ask for none here."""
    tasks, jobs = tmp_path / "tasks", tmp_path / "jobs"
    folders.write_all(tasks)
    for file in tasks.glob("*/task.toml"):
        kept = [line for line in file.read_text().split("\n") if "net" not in line.split("=")[0]]
        file.write_text("\n".join(kept))
    command = [os.environ["BRIDLE_HARBOR"], "run", "--path", str(tasks), "--agent", agent]
    command += ["--jobs-dir", str(jobs), "--n-concurrent", "2", "--env", "docker", "--yes"]
    subprocess.run(command, check=True, capture_output=True)

    found = {}
    for file in jobs.glob("*/*/result.json"):
        result = json.loads(file.read_text())
        rewards = (result["verifier_result"] or {}).get("rewards")
        found[result["task_name"]] = (rewards or {}).get("reward")
    assert found == dict.fromkeys((path.name for path in tasks.iterdir()), reward)
