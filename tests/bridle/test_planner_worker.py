"""The planner and the worker of the examples: two roles of one app, each with credit of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridle.engine.scripted import ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.harnesses.sandboxes.process import ProcessSandbox
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import Delivery
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.reconstruct.episodes import episodes
from bridle.reconstruct.rewards import session_rewards
from bridle.reconstruct.samples.sample import Episode
from bridle.run.examples import load_example
from bridle.run.report import training_figures
from bridle.run.rollouts import rollout
from bridle.store.reading.queries import Reader
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import AdvantageConfig, GrpoConfig

DIRECTORY, EXAMPLE = load_example("planner_worker")
AGENT = DIRECTORY / "agent.py"
ASKED = "What is "


@pytest.mark.parametrize(
    ("answer", "planner", "worker"),
    [
        ("Eva: tailor | Tom: Baker.", 1.0, 1.0),
        ("Tom: baker | Eva: a tailor", 1.0, 0.75),
        ("Eva: tailor", 0.5, 1.0),
        ("Eva: tailor | Ben: baker | Tom: baker", 2 / 3, 1.0),
        ("Eva: tailor | Eva: tailor", 0.5, 1.0),
        ("Eva: baker | Tom: baker or tailor", 1.0, 0.0),
        ("Ben: Rome", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_each_role_is_scored_by_what_it_answers_for(
    answer: str, planner: float, worker: float, tmp_path: Path
) -> None:
    task = Task(id="t", prompt="", payload={"jobs": {"Eva": "tailor", "Tom": "baker"}})
    delivered = Delivery(task, answer, tmp_path, 0, ProcessSandbox(tmp_path))
    assert EXAMPLE.verifier(delivered) == pytest.approx({"planner": planner, "worker": worker})


def test_the_splits_share_no_job_of_a_person_and_hold_enough() -> None:
    train, held_out = EXAMPLE.tasks("train"), EXAMPLE.tasks("held_out")
    known, new = (
        {pair for task in tasks for pair in task.payload["jobs"].items()}
        for tasks in (train, held_out)
    )
    assert not known & new
    assert len({task.id for task in (*train, *held_out)}) == len(train) + len(held_out)
    assert len(train) > 2000
    assert len(held_out) > 200
    assert EXAMPLE.tasks("train", 20, seed=3) == EXAMPLE.tasks("train", 20, seed=3)
    assert EXAMPLE.tasks("train", 20, seed=3) != EXAMPLE.tasks("train", 20, seed=4)


def sessions_of(task: Task) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the planner's reply in four sessions, and the jobs that the worker then gives."""
    (one, job), (other, second) = task.payload["jobs"].items()
    yield f"{one}, {other}", {one: job, other: second}
    yield f"{one}, {other}", {one: job, other: job}
    yield one, {one: job}
    yield "Nobody", {"Nobody": "none"}


SIZES = ("--set", "groups.per_step=4", "--set", "groups.size=8")
REWARDS = [(1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (0.0, 0.0)]
"""The planner's and the worker's, by session."""


@pytest.fixture
def recorded(model_dir: Path, store: str, tmp_path: Path) -> str:
    """A store with a group of four sessions of the app itself, one after another."""
    (task,) = EXAMPLE.tasks("train", 1)
    coming = sessions_of(task)
    jobs: dict[str, str] = {}

    def reply(request: ScriptedRequest) -> ScriptedReply:
        question = str(request.messages[-1]["content"])
        if ASKED not in question:
            plan, found = next(coming)
            jobs.clear()
            jobs.update(found)
            return ScriptedReply(plan)
        return ScriptedReply(jobs[question.partition(ASKED)[2].partition("'")[0]])

    with (
        ScriptedEngine(model_dir, reply, served_model_name="policy") as engine,
        ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=model_dir)) as proxy,
    ):
        results = rollout(
            str(AGENT),
            [task],
            EXAMPLE.verifier,
            proxy=proxy.base_url,
            directory=tmp_path / "sessions",
            group_size=4,
            parallel=1,
        )
    assert [result.error for result in results] == [""] * 4
    return store


def as_they_ran(store: str) -> list[Episode]:
    """Sessions are opened ahead of their turn, in any order."""
    with Reader(store) as reader:
        began = {one.id: reader.calls(one.id)[0].started_at for one in reader.sessions()}
        return sorted(episodes(reader), key=lambda episode: began[episode.session.id])


def test_two_roles_are_recorded_with_a_row_and_a_reward_each(recorded: str) -> None:
    built = as_they_ran(recorded)
    with Reader(recorded) as reader:
        roles = [[call.role for call in reader.calls(one.session.id)] for one in built]
    assert roles == [["planner"] + ["worker"] * asked for asked in (2, 2, 1, 1)]
    assert [session_rewards(episode.rewards) for episode in built] == [
        {"planner": planner, "worker": worker} for planner, worker in REWARDS
    ]
    assert [sorted(str(sample.role) for sample in episode.samples) for episode in built] == [
        ["planner", "worker"]
    ] * 4


def test_each_role_is_compared_with_itself(recorded: str) -> None:
    """The worker has a step for each name that the planner gave, so its baseline is another."""
    built = as_they_ran(recorded)
    config = GrpoConfig(advantages=AdvantageConfig(baseline="per_role"))
    prepared = prepare(built, 0, config)
    found: dict[tuple[str, str | None], set[float]] = {
        (item.sample.session_id, item.sample.role): set(item.credit[item.sample.mask].tolist())
        for item in prepared.items
    }
    planner, worker = np.asarray(REWARDS).T
    steps = np.repeat(worker, (2, 2, 1, 1))
    for role, own, seen in (("planner", planner, planner), ("worker", worker, steps)):
        wanted = (own - seen.mean()) / (seen.std(ddof=1) + 1e-6)
        for episode, value in zip(built, wanted, strict=True):
            (credit,) = found[episode.session.id, role]
            assert credit == pytest.approx(value, abs=1e-6)
    assert not {"no_baseline"} & set(prepared.account.masked)


@pytest.fixture
def begun(bridle: Callable[..., Any], tmp_path: Path) -> Path:
    """A tiny policy that has seen some conversations as they should go, and errs in most."""
    made = [sys.executable, str(DIRECTORY / "tasks.py")]
    lines = subprocess.run(made, capture_output=True, text=True, check=True).stdout.splitlines()
    data, blank, policy = tmp_path / "first.jsonl", tmp_path / "blank", tmp_path / "policy"
    data.write_text("\n".join(lines[:200]))
    texts = [turn["content"] for line in lines for turn in json.loads(line)["messages"]]
    size = train_tokenizer(blank, texts, vocab_size=512)
    shape = TinyShape(hidden=64, layers=2, heads=2, kv_heads=2, intermediate=128, context=512)
    make_policy(blank, shape, vocab_size=size, seed=3)
    learned = bridle(
        *("sft", "--policy", blank, "--out", policy, "--data", data, "--store", tmp_path / "none"),
        *("--set", "epochs=4", "--set", "batch_size=16"),
        *("--set", "optimizer.learning_rate=3e-3"),
    )
    assert learned.exit_code == 0, learned.output
    return policy


LENGTHS = """
def lengths(delivery):
    places = [place.partition(":") for place in delivery.answer.split("|")]
    return {
        "planner": sum(len(name) for name, _, _ in places) / 10,
        "worker": sum(len(job) for _, _, job in places) / 10,
    }
"""
"""A verifier whose rewards differ within a group whatever a tiny policy has learned."""


@pytest.mark.loop
@pytest.mark.usefixtures("warm_start")
def test_a_step_trains_both_roles_with_per_role_credit(begun: Path, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.py"
    lengths.write_text(LENGTHS)
    verifier = f"{lengths}:lengths"
    done = train(begun, tmp_path / "out", "--steps", "1", *SIZES, verifier=verifier)
    assert done.returncode == 0, done.stdout + done.stderr
    with Reader(str(tmp_path / "out" / "bridle.db")) as reader:
        (run,) = reader.runs("train")
        built = list(episodes(reader, run=run.id))
        figures = training_figures(reader, run.id)
    assert len(built) == 32
    for episode in built:
        assert set(session_rewards(episode.rewards)) == {"planner", "worker"}
        roles = [sample.role for sample in episode.samples]
        assert roles in (["planner"], ["planner", "worker"]), "a row for each role that acted"
    assert run.config["settings"]["advantages"]["baseline"] == "per_role"
    config = GrpoConfig(advantages=AdvantageConfig(baseline="per_role"))
    prepared = prepare(built, 0, config)
    assert {item.sample.role for item in prepared.items} == {"planner", "worker"}
    assert figures["tokens_trained"] == prepared.account.trained > 0
    trained = tmp_path / "out" / "checkpoints" / "step-00000001" / "policy" / "model.safetensors"
    assert trained.read_bytes() != (begun / "model.safetensors").read_bytes()


@pytest.mark.loop
@pytest.mark.usefixtures("warm_start")
@pytest.mark.sampled(0)
def test_each_role_trains_a_policy_of_its_own_and_goes_on(begun: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    own = ("--set", f"policies.worker.model={begun}")
    lengths = tmp_path / "lengths.py"
    lengths.write_text(LENGTHS)
    for steps in ("1", "2"):
        done = train(begun, out, "--steps", steps, *SIZES, *own, verifier=f"{lengths}:lengths")
        assert done.returncode == 0, done.stdout + done.stderr
    with Reader(str(out / "bridle.db")) as reader:
        (run,) = reader.runs("train")
        published = {(one.name, one.version) for one in reader.policies(run.id) if one.verified}
        asked = {
            (call.role, call.policy)
            for session in reader.sessions(run=run.id)
            for call in reader.calls(session.id)
        }
        built = list(episodes(reader, run=run.id))
        trained = {
            name: sum(metric.value for metric in reader.metrics(run.id, f"{name}tokens/trained"))
            for name in ("", "worker/")
        }
    assert asked == {("planner", None), ("worker", "worker")}
    assert published >= {("policy", 1), ("worker", 1), ("policy", 2), ("worker", 2)}
    of_role = {
        role: sum(
            int(sample.mask.sum())
            for episode in built
            for sample in episode.samples
            if sample.role == role
        )
        for role in ("planner", "worker")
    }
    assert 0 < trained[""] <= of_role["planner"]
    assert 0 < trained["worker/"] <= of_role["worker"]
    versions = {int(v) for one in built for each in one.samples for v in each.versions[each.mask]}
    assert versions == {0, 1}
    first = (begun / "model.safetensors").read_bytes()
    ends = [
        (place / "checkpoints" / "step-00000002" / "policy" / "model.safetensors").read_bytes()
        for place in (out, out / "policies" / "worker")
    ]
    assert len({first, *ends}) == 3

    late = [
        *(sys.executable, "-m", "bridle", "train", "--set", "recordings.policy=worker"),
        *(
            "--set",
            f"recordings.run={run.id}",
            "--from-store",
            str(out / "bridle.db"),
            "--policy",
            str(begun),
        ),
        *("--set", "groups.per_step=4", "--steps", "1", "--out", str(tmp_path / "late")),
    ]
    done = subprocess.run(late, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with Reader(str(out / "bridle.db")) as reader:
        figures = {one.name: one.value for one in reader.metrics("train:late")}
        (begins,) = reader.policies("train:late")
    assert 0 < figures["tokens/trained"] <= of_role["worker"]
    assert figures["tokens/masked/other_policy"] > 0
    assert (begins.name, begins.version) == ("worker", 0)


def test_a_policy_that_cannot_be_had_is_refused_before_anything_starts(
    begun: Path, bridle: Callable[..., Any], tmp_path: Path
) -> None:
    def refused(*assignments: str) -> str:
        sets = [part for assignment in assignments for part in ("--set", assignment)]
        done = bridle(*command(begun, tmp_path / "out", *sets))
        assert done.exit_code == 2
        assert not (tmp_path / "out" / "bridle.db").exists()
        return " ".join(done.stderr.split())

    assert "needs another name" in refused("policies.policy.roles=[]")
    both = ('policies.one.roles=["worker"]', 'policies.two.roles=["worker"]')
    assert "role worker has two policies, one and two" in refused(*both)
    assert "there is no setting 'rolls', but model, roles" in refused("policies.one.rolls=3")
    assert "replay is for one policy" in refused(
        "policies.worker.roles=[]", "training.replay.share=0.5"
    )
    lora = ("training.publish.through=lora", "training.lora.rank=4", "policy.engine=vllm")
    copied = shutil.copytree(begun, tmp_path / "copy")
    assert "another model than policy.model" in refused(f"policies.worker.model={copied}", *lora)
    other = tmp_path / "other"
    shape = TinyShape(hidden=64, layers=2, heads=2, kv_heads=2, intermediate=128, context=512)
    size = train_tokenizer(other, ["another tokenizer altogether"] * 20, vocab_size=300)
    make_policy(other, shape, vocab_size=size, seed=3)
    assert "another tokenizer" in refused(f"policies.worker.model={other}")


def command(
    policy: Path,
    out: Path,
    *arguments: str,
    verifier: str = f"{DIRECTORY / 'tasks.py'}:verifier",
) -> list[str]:
    """The command of the example's page, with a policy and sizes of this test."""
    return [
        *("train", "--policy", str(policy)),
        *("--agent", str(AGENT), "--tasks", f"{DIRECTORY / 'tasks.py'}:train"),
        *("--verifier", verifier),
        *("--set", "training.advantages.baseline=per_role"),
        *("--set", "training.optimizer.learning_rate=1e-3", "--out", str(out), *arguments),
    ]


def train(
    policy: Path, out: Path, *arguments: str, **given: str
) -> subprocess.CompletedProcess[str]:
    asked = [sys.executable, "-m", "bridle", *command(policy, out, *arguments, **given)]
    return subprocess.run(asked, capture_output=True, text=True, check=False)
