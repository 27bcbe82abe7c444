"""Test judges by a Harbor folder's rubric, on a session of 64 turns."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from bridle.diagnosis.findings import findings_of_run
from bridle.engine.scripted import ScriptedCall, ScriptedReply, ScriptedRequest, Stall
from bridle.reconstruct.episodes import episodes
from bridle.store.reading.queries import Reader
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import AdvantageConfig, GrpoConfig
from support.rollouts import ScriptedRollout, scripted_proxy

TURNS = 64
AGENT = """
print(work(sys.argv[1], "look", "a lamp"))
"""
OWN = """
from dataclasses import replace
from pathlib import Path
from bridle.harnesses.tasks.harbor.loader import harbor_task

def tasks():
    task = harbor_task(Path(__file__).parent.resolve() / "harbor", "suite")
    return [replace(task, container=None)]

async def check(delivery):
    return float(delivery.answer == "done")
"""
TASK = """
schema_version = "1.0"
[environment]
docker_image = "debian:12"
"""


def walk(request: ScriptedRequest) -> ScriptedReply:
    """Look once for each turn but the last."""
    looks = sum(message["role"] == "tool" for message in request.messages)
    if looks < TURNS - 1:
        return ScriptedReply(tool_calls=(ScriptedCall("look", {"at": f"shelf {looks}"}),))
    return ScriptedReply("done")


class Judge:
    """A judge whose reply is made of the number of times that it was asked before."""

    def __init__(self, reply: Callable[[int], ScriptedReply | Stall | str]) -> None:
        self.asked: list[str] = []
        self._reply = reply

    def __call__(self, request: ScriptedRequest) -> ScriptedReply | Stall | str:
        self.asked.append(str(request.messages[-1]["content"]))
        return self._reply(len(self.asked) - 1)


def scores(score: float, by_turn: float) -> str:
    turns = {str(turn): by_turn for turn in range(1, TURNS + 1)}
    return json.dumps({"score": score, "turns": turns})


@pytest.fixture
def over() -> threading.Event:
    """Ends the hanging judge."""
    return threading.Event()


@pytest.fixture
def judges(over: threading.Event) -> dict[str, Judge]:
    return {
        "mild": Judge(lambda _: scores(1.0, 0.75)),
        "strict": Judge(lambda _: scores(0.5, 0.25)),
        "hangs": Judge(lambda _: Stall(600.0, over=over)),
        "chats": Judge(lambda _: "I like it."),
        "two_values": Judge(lambda _: '{"score": 1, "score": 0}'),
        "moody": Judge(lambda number: scores(number % 2, 0.5)),
    }


@pytest.fixture
def rollout(
    bridle: Callable[..., Result],
    judges: dict[str, Judge],
    over: threading.Event,
    model_dir: Path,
    store: str,
    tmp_path: Path,
) -> Iterator[Callable[..., str]]:
    folder = tmp_path / "harbor"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test.sh").write_text("exit 0\n")
    (folder / "instruction.md").write_text("Find the lamp.\n")
    (folder / "task.toml").write_text(TASK)
    (folder / "rubric.md").write_text("Look at every shelf once.\n")
    with scripted_proxy(model_dir, store, walk, judges) as proxy:
        run = ScriptedRollout(bridle, proxy, tmp_path, AGENT, OWN, {"prompt": ""}, "tasks")

        def call(named: list[str], size: int = 1, **options: object) -> str:
            stated = {"judges": named, **options}
            sets = [
                part
                for name, value in stated.items()
                for part in ("--set", f"scorers.options.rubric.{name}={json.dumps(value)}")
            ]
            size_of = ("--group-size", size, "--set", "agent.parallel=1")
            done = run("check", *size_of, *sets, scorers=("rubric",))
            assert done.exit_code == 0, done.output
            return done.stderr

        yield call
        over.set()


def rows(store: str, query: str) -> list[Any]:
    with sqlite3.connect(store) as connection:
        return connection.execute(query).fetchall()


def test_each_of_64_turns_has_the_reward_of_several_judges_in_sql(
    rollout: Callable[..., str], judges: dict[str, Judge], store: str
) -> None:
    shown = rollout(["mild", "strict"], size=2)
    assert "judgements: 2 asked of models, 2 answered by equal earlier ones" in shown
    placed = rows(
        store,
        "SELECT session_id, count(DISTINCT turn), count(DISTINCT call_id), min(value), max(value)"
        " FROM rewards WHERE name = 'rubric.turn' AND source = 'scorer' GROUP BY session_id",
    )
    assert [own[1:] for own in placed] == [(TURNS, TURNS, 0.5, 0.5)] * 2
    whole = rows(store, "SELECT value, detail FROM rewards WHERE name = 'rubric'")
    assert [one[0] for one in whole] == [0.75, 0.75]
    kept = {"judges": {"mild": 1.0, "strict": 0.5}, "spread": 0.5}
    assert [json.loads(one[1]) for one in whole] == [kept] * 2
    assert [len(one.asked) for one in judges.values()] == [1, 1, 0, 0, 0, 0]
    assert "Look at every shelf once." in judges["mild"].asked[0]
    assert "## Turn 64" in judges["mild"].asked[0]
    with Reader(store) as reader:
        (run,) = reader.runs("rollout")
        group = list(episodes(reader, run=run.id))
        judged = [one for one in episodes(reader) if one.session.run_id is None]
    assert [one.conservation.trained for one in judged] == [0, 0]
    assert all(one.conservation.captured > 0 and not one.samples for one in judged)
    weights = {"reward": 1.0, "rubric.turn": 1.0}
    config = AdvantageConfig(reward_weights=weights, reward_turns="sum")
    step = prepare(group, 0, GrpoConfig(advantages=config))
    assert step.session_rewards == {0: 33.0, 1: 33.0}


def test_a_judge_that_hangs_lies_or_contradicts_itself_is_named_and_costs_nothing(
    rollout: Callable[..., str], store: str
) -> None:
    bad = ["hangs", "chats", "two_values", "moody"]
    rollout(["mild", *bad], seconds=2, judgements=2)
    given = rows(store, "SELECT name, detail FROM rewards WHERE kind = 'finding'")
    findings = {
        (name, (own := json.loads(detail))["judge"]): own["error"] for name, detail in given
    }
    expected = {
        ("rubric.judge_failed", "hangs"): "gave no reply in 2 s (options.rubric.seconds)",
        ("rubric.judge_failed", "chats"): "gave no scores from 0 to 1 as asked",
        ("rubric.judge_contradiction", "two_values"): "score is 1 and 0",
        ("rubric.judge_contradiction", "moody"): "contradicts itself on the session: [",
    }
    assert findings.keys() == expected.keys()
    assert all(expected[key] in error for key, error in findings.items())
    outcomes = rows(store, "SELECT outcome FROM sessions WHERE run_id IS NOT NULL")
    assert outcomes == [("completed",)]
    scored = dict(rows(store, "SELECT name, max(value) FROM rewards WHERE kind='score' GROUP BY 1"))
    assert scored == {"reward": 1.0, "rubric": 1.0, "rubric.turn": 0.75}
    with Reader(store) as reader:
        (run,) = reader.runs("rollout")
        names = {one.name: one for one in findings_of_run(reader, run.id)}
    assert "guard_findings" not in names, "no agent is to blame"
    assert "rubric.judge_failed" in names["scoring_failed"].evidence


def test_without_any_judge_the_scorer_has_failed_with_the_reasons(
    rollout: Callable[..., str], store: str
) -> None:
    rollout(["hangs", "chats"], seconds=1)
    ((detail,),) = rows(store, "SELECT detail FROM rewards WHERE kind = 'finding'")
    error = json.loads(detail)["error"]
    assert "the judge hangs gave no reply in 1 s" in error
    assert "the judge chats gave no scores" in error
