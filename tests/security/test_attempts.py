"""The agent plays for its reward, with the proxy's key in its file: no attempt changes anything."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.harnesses.episode import Outcome
from bridle.harnesses.sandboxes.walls import missing
from bridle.harnesses.tasks import Task
from bridle.run.environment import admin_key_file
from bridle.run.rollouts import rollout
from bridle.run.services import Service
from bridle.store.reading.queries import Reader
from bridle.store.reward import RewardSource

ATTEMPTS = Path(__file__).with_name("attempts.py")
NAMES = set(runpy.run_path(str(ATTEMPTS))["ATTEMPTS"])
AGENT = """
import json, os, runpy, sys, urllib.request
found = runpy.run_path({attempts!r}, run_name="attempts")
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({{"model": "policy", "messages": [{{"role": "user", "content": "2?"}}]}}).encode(),
    {{"content-type": "application/json",
      "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}},
)
urllib.request.urlopen(request).read()
found["attack"](json.loads({targets!r}))
print("wrong")
"""

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no namespaces: {missing()}")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRIDLE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("BRIDLE_ADMIN_KEY", raising=False)
    return tmp_path / "home"


@pytest.fixture
def proxy_url(home: Path, model_dir: Path, tmp_path: Path) -> Iterator[str]:
    """The URL of a ``bridle proxy`` with its store among the user's files.

    It has the key that it made for itself.
    """
    with ScriptedEngine(
        model_dir, lambda _: ScriptedReply("4"), served_model_name="policy"
    ) as engine:
        arguments = ["proxy", "--upstream", engine.base_url, "--tokenizer", str(model_dir)]
        arguments += ["--store", str(tmp_path / "mine.db"), "--port", "0"]
        with Service(arguments, tmp_path / "proxy.log") as service:
            yield service.url


@pytest.mark.parametrize("sandbox", ["process", "forked"])
def test_no_attempt_from_inside_a_rollout_changes_a_reward_or_ends_the_run(
    proxy_url: str, tmp_path: Path, sandbox: Any
) -> None:
    targets = {
        "key": str(admin_key_file()),
        "store": str(tmp_path / "mine.db"),
        "verifier": __file__,
        "tasks": str(tmp_path / "tasks.jsonl"),
        "sessions": str(tmp_path / "sessions"),
        "agent": str(tmp_path / "agent.py"),
    }
    assert all(Path(targets[name]).exists() for name in ("key", "store"))
    (tmp_path / "tasks.jsonl").write_text("")
    agent = AGENT.format(attempts=str(ATTEMPTS), targets=json.dumps(targets))
    (tmp_path / "agent.py").write_text(agent)
    made: list[list[Any]] = []

    def careless(delivery: Any) -> float:
        """Opens whatever has the names that it expects."""
        made.append(json.loads((delivery.workspace / "attempts.json").read_text()))
        for name in runpy.run_path(str(ATTEMPTS))["LEFT"]:
            if (delivery.workspace / name).exists():
                (delivery.workspace / name).read_bytes()
                return 100.0
        return 0.25

    named = f"{sys.executable} {tmp_path / 'agent.py'} {{prompt}}"
    results = rollout(
        named,
        [Task(f"t{number}", "2?") for number in range(3)],
        careless,
        proxy=proxy_url,
        sandbox=sandbox,
        directory=tmp_path / "sessions",
        parallel=2,
    )

    assert [(one.outcome, one.scores) for one in results] == [
        (Outcome.COMPLETED, {"reward": 0.25})
    ] * 3, results
    assert len(made) == 3
    for attempts in made:
        assert {name for name, _, _ in attempts} == NAMES, "each was executed"
        assert not [one for one in attempts if one[1]], "and got nothing"
    with Reader(str(tmp_path / "mine.db")) as reader:
        for one in results:
            (reward,) = reader.rewards(str(one.session_id))
            assert (reward.value, reward.source) == (0.25, RewardSource.VERIFIER)
        assert len(list(reader.sessions())) == 3
    assert not list((tmp_path / "sessions").iterdir()), "all that they left is removed"
