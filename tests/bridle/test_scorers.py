"""Test the way from a scorer, or a verifier's placed rewards, to the record and the advantages."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from bridle.engine.scripted import ScriptedCall, ScriptedReply, ScriptedRequest
from bridle.reconstruct.episodes import episodes
from bridle.reconstruct.samples.sample import Episode
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord
from bridle.store.reward import Reward, RewardKind, RewardSource
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import AdvantageConfig, GrpoConfig
from support.rollouts import ScriptedRollout, scripted_proxy

Bridle = Callable[..., Result]

AGENT = """
for role in ("planner", "worker"):
    reply = work(f"{sys.argv[1]} {role}", "look", "a lamp", {"thread-id": role})
open("notes.txt", "w").write("left behind")
print(reply)
"""
OWN = """
import os, time
from bridle import Score

def parts(delivery):
    right = float("right" in delivery.answer)
    return [
        Score("reward", right),
        Score("solved", right, kind="success"),
        Score("plan", 0.5, role="planner"),
        Score("step", right, turn=1),
        Score("step", 1.0, turn=99),
    ]

async def quick(delivery):
    return float("right" in delivery.answer)

def looks(session):
    assert session.artefacts == {"notes.txt": b"left behind"}, session.artefacts
    assert session.ask is None
    found = [
        Score("seen", 1.0, turn=turn.turn)
        for turn in session.turns
        if any(message["role"] == "tool" for message in turn.messages)
    ]
    ends = [Score("end", float(len(branch)), branch=branch[-1].id) for branch in session.branches]
    roles = [Score("turns", float(len(own)), role=role) for role, own in session.roles.items()]
    assert session.scores == {"reward": float("right" in session.answer)}
    return [Score("looks", float(os.getpid())), *found, *ends, *roles]

def hangs(session):
    time.sleep(600)

def raises(session):
    return session.task.payload["nothing"]

def grows(session):
    return len(bytes(1 << 40))

def none(session):
    return ["reward"]

def nan(session):
    return {"x": float("nan")}
"""


class Policy:
    """A policy whose planner looks once; every other session's worker is right."""

    def __init__(self) -> None:
        self.judged: list[str] = []
        self.verdict = '{"score": 0.5, "turns": {"1": 1, "3": 0.25}}'
        self._workers = 0
        self._lock = threading.Lock()

    def __call__(self, request: ScriptedRequest) -> ScriptedReply:
        asked = str(request.messages[-1]["content"])
        if "# Rubric" in asked:
            self.judged.append(asked)
            return ScriptedReply(self.verdict)
        if asked.endswith("planner"):
            return ScriptedReply(tool_calls=(ScriptedCall("look", {"at": "desk"}),))
        if asked == "a lamp":
            return ScriptedReply("go")
        with self._lock:
            self._workers += 1
            return ScriptedReply("right" if self._workers % 2 else "wrong, and at length")


@pytest.fixture
def policy() -> Policy:
    return Policy()


@pytest.fixture
def proxy(model_dir: Path, store: str, policy: Policy) -> Iterator[str]:
    with scripted_proxy(model_dir, store, policy) as url:
        yield url


@pytest.fixture
def rollout(bridle: Bridle, proxy: str, tmp_path: Path) -> Bridle:
    task = {"prompt": "Find it.", "payload": {"rubric": "Be right."}}
    run = ScriptedRollout(bridle, proxy, tmp_path, AGENT, OWN, task)

    def call(verifier: str, scorers: list[str], *assignments: str) -> Result:
        artefacts = 'scorers.artefacts=["notes.txt", "missing.txt"]'
        sets = [part for one in (artefacts, *assignments) for part in ("--set", one)]
        few = ("--group-size", 2, "--set", "agent.parallel=1")
        return run(verifier, *few, *sets, scorers=tuple(scorers))

    return call


def recorded(store: str) -> tuple[list[Episode], list[SessionRecord]]:
    """Return the run's sessions, the right one first, and the other sessions."""
    with Reader(store) as reader:
        (run,) = reader.runs("rollout")
        own = sorted(episodes(reader, run=run.id), key=lambda one: -value(one, "reward"))
        return own, [one for one in reader.sessions() if one.run_id is None]


def value(episode: Episode, name: str) -> float:
    (found,) = (one.value for one in episode.rewards if one.name == name and one.whole)
    return found


def of_name(episode: Episode, name: str) -> list[Reward]:
    return [one for one in episode.rewards if one.name == name]


def advantages(group: list[Episode], **stated: Any) -> list[list[float]]:
    """Return the advantage of each call in the order of turns, by session."""
    step = prepare(group, 0, GrpoConfig(advantages=AdvantageConfig(**stated)))
    found: list[dict[str, float]] = [{} for _ in group]
    for item in step.items:
        for place, call_id in enumerate(item.sample.call_ids):
            (here,) = set(item.credit[(item.sample.calls == place) & item.sample.mask].tolist())
            found[item.session][call_id] = here
    return [
        [own[turn.call_id] for turn in episode.turns]
        for own, episode in zip(found, group, strict=True)
        if own
    ]


def test_a_verifier_may_give_rewards_at_places_and_one_that_is_lost_is_a_finding(
    rollout: Bridle, store: str, bridle: Bridle
) -> None:
    done = rollout("parts", [])
    assert done.exit_code == 0, done.output
    group, _ = recorded(store)
    for episode, right in zip(group, (1.0, 0.0), strict=True):
        places = {
            (one.name, one.kind.value): (one.value, one.role, one.turn) for one in episode.rewards
        }
        assert places == {
            ("reward", "score"): (right, None, None),
            ("solved", "success"): (right, None, None),
            ("plan", "score"): (0.5, "planner", None),
            ("step", "score"): (right, None, 1),
            ("misplaced_reward", "finding"): (1.0, None, None),
        }
        (lost,) = of_name(episode, "misplaced_reward")
        assert lost.detail == {"reward": "step", "value": 1.0, "turn": 99}
        (step,) = of_name(episode, "step")
        assert step.call_id == episode.turns[0].call_id
    measured = bridle("eval", "--store", store, "--json")
    assert json.loads(measured.stdout)["all"]["pass_at"]["1"]["value"] == 0.5
    right, wrong = advantages(group, baseline="per_role")
    assert right[0] == right[1] > wrong[0]
    assert right[2] > wrong[2]


def test_a_scorer_reads_the_record_in_a_process_of_its_own_and_counts_by_its_weight(
    rollout: Bridle, store: str
) -> None:
    done = rollout("parts", ["own:looks", "cost", "format"])
    assert done.exit_code == 0, done.output
    group, _ = recorded(store)
    for episode in group:
        given = [one for one in episode.rewards if one.source is RewardSource.SCORER]
        assert all(one.kind is RewardKind.SCORE for one in given)
        calls = [turn.call_id for turn in episode.turns]
        assert [one.call_id for one in of_name(episode, "looks.seen")] == [calls[1]]
        ends = {one.branch: one.value for one in of_name(episode, "looks.end")}
        assert ends == {calls[1]: 2.0, calls[2]: 1.0}
        turns = {one.role: one.value for one in of_name(episode, "looks.turns")}
        assert turns == {"planner": 2.0, "worker": 1.0}
        assert [one.value for one in of_name(episode, "format.turn")] == [1.0] * 3
        cost = [one.value for one in of_name(episode, "cost.turn")]
        sampled = [int((s.calls >= 0).sum()) for s in episode.samples]
        assert sum(cost) == pytest.approx(-0.001 * sum(sampled)) == value(episode, "cost")
    assert len({value(one, "looks") for one in group}) == 2, "each session has a process"
    plain = advantages(group)
    assert plain == advantages([stripped(one, RewardSource.SCORER) for one in group])
    weights = {"reward": 1.0, "cost.turn": -1000.0}
    right, wrong = advantages(group, baseline="gigpo", reward_weights=weights)
    assert right[2] < 0 < wrong[2], "the wrong worker has more tokens"


def stripped(episode: Episode, source: RewardSource) -> Episode:
    return replace(episode, rewards=tuple(o for o in episode.rewards if o.source is not source))


def test_a_scorer_that_fails_is_named_and_costs_no_session(rollout: Bridle, store: str) -> None:
    failing = {
        "raises": "raised KeyError: 'nothing'",
        "grows": "the scorer took more than",
        "none": "'reward' is no reward: return a number, numbers by name, or bridle.Score",
        "nan": "x is nan",
    }
    named = [f"own:{name}" for name in failing]
    done = rollout("parts", [*named, "format"])
    assert done.exit_code == 0, done.output
    group, _ = recorded(store)
    assert [one.session.outcome for one in group] == ["completed"] * 2
    for episode in group:
        errors = {
            one.detail["scorer"]: one.detail["error"] for one in of_name(episode, "scorer_failed")
        }
        assert errors.keys() == failing.keys()
        assert all(failing[name] in error for name, error in errors.items()), errors
        assert value(episode, "format") == 1.0
    assert advantages(group) == advantages([stripped(one, RewardSource.SCORER) for one in group])


def test_a_scorer_that_hangs_is_ended_at_its_bound(rollout: Bridle, store: str) -> None:
    assert rollout("quick", ["own:hangs"], "agent.bounds.verifier_s=3").exit_code == 0
    group, _ = recorded(store)
    for episode in group:
        assert episode.session.outcome == "completed"
        (failed,) = of_name(episode, "scorer_failed")
        assert "took more than 3 s (agent.bounds.verifier_s)" in failed.detail["error"]


def test_a_judge_is_asked_through_the_proxy_and_its_tokens_are_not_trained(
    rollout: Bridle, store: str, policy: Policy
) -> None:
    done = rollout("parts", ["rubric"], 'scorers.options.rubric.judges=["policy", "policy"]')
    assert done.exit_code == 0, done.output
    group, others = recorded(store)
    assert len(policy.judged) == len(others) == 2, "an equal question is asked once"
    assert all("Be right." in one and "look" in one and "a lamp" in one for one in policy.judged)
    assert {one.labels["judges"] for one in others} == {one.session.id for one in group}
    with Reader(store) as reader:
        for one in others:
            (call,) = reader.calls(one.id)
            assert (reader.judged(one.id)[call.id]["kind"], one.outcome) == ("side", "completed")
            (judged,) = [e for e in episodes(reader) if e.session.id == one.id]
            assert (judged.conservation.trained, judged.samples) == (0, ())
            assert judged.conservation.captured > 0
    for episode in group:
        assert value(episode, "rubric") == 0.5
        turns = {one.turn: one.value for one in of_name(episode, "rubric.turn")}
        assert turns == {1: 1.0, 3: 0.25}
        assert of_name(episode, "rubric")[0].detail == {"judges": {"policy": 0.5}, "spread": 0.0}


@pytest.mark.parametrize(
    ("verdict", "error"),
    [
        ("I like it.", "gave no scores from 0 to 1 as asked"),
        ('{"score": 7}', "7 is no number from 0 to 1"),
        ('{"score": 1, "turns": {"64": 1}}', "scored turns that are not there: [64]"),
    ],
)
def test_a_judge_that_lies_about_the_form_is_named(
    rollout: Bridle, store: str, policy: Policy, verdict: str, error: str
) -> None:
    policy.verdict = verdict
    assert rollout("parts", ["rubric"], "scorers.judgements=1").exit_code == 0
    group, _ = recorded(store)
    failed = [of_name(one, "scorer_failed")[0].detail["error"] for one in group]
    assert sum(error in one for one in failed) == 1
    assert sum("the budget of 1 judgements is used up" in one for one in failed) == 1


def test_an_unknown_scorer_or_option_is_refused_before_anything_starts(rollout: Bridle) -> None:
    unknown = rollout("parts", ["costs"])
    assert (unknown.exit_code, "there is no scorer 'costs'" in unknown.stderr) == (2, True)
    option = rollout("parts", ["cost"], "scorers.options.cost.price=1")
    assert (option.exit_code, "has no option 'price'" in option.stderr) == (2, True)
