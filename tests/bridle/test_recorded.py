"""``bridle train --from-store``: sessions that are recorded already, rewarded whenever."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bridle.store.reading.queries import Reader
from bridle.store.reward import Reward
from bridle.store.writing.writer import Writer
from bridle.trainer.learner.checkpoint import checkpoints
from bridle.trainer.policy.model import load_policy, save_policy
from support.processes import bridle

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("warm_start")]

LIVE = (
    "--steps",
    "2",
    "--set",
    "groups.per_step=4",
    "--set",
    "groups.size=8",
    "--set",
    "agent.parallel=16",
)


@pytest.fixture
def live(training_arguments: Callable[..., list[str]], tmp_path: Path) -> Path:
    """The output of ``bridle train`` after two steps of 32 sessions each."""
    done = bridle(*training_arguments(), *LIVE)
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path / "out"


def weights(output: Path) -> bytes:
    return (checkpoints(output / "checkpoints")[-1] / "policy" / "model.safetensors").read_bytes()


def without_rewards(store: Path, copy: Path) -> list[Reward]:
    """A copy of ``store`` in which no session is rewarded; returns the rewards."""
    with sqlite3.connect(store) as source, sqlite3.connect(copy) as target:
        source.backup(target)
        target.execute("DELETE FROM rewards")
    with Reader(str(store)) as reader:
        return [reward for one in reader.sessions() for reward in reader.rewards(one.id)]


def test_sessions_rewarded_late_give_the_weights_of_the_same_sessions_trained_live(
    live: Path, tmp_path: Path
) -> None:
    store = tmp_path / "late.db"
    rewards = without_rewards(live / "bridle.db", store)
    assert len(rewards) == 64
    again = [
        *("train", "--from-store", str(store), "--policy", str(tmp_path / "policy")),
        *(
            "--set",
            "groups.per_step=4",
            "--set",
            "groups.size=8",
            "--set",
            "training.optimizer.learning_rate=0.001",
        ),
    ]
    unrewarded = bridle(*again, "--out", str(tmp_path / "nothing"))
    assert unrewarded.returncode == 0, unrewarded.stderr
    assert weights(tmp_path / "nothing") != weights(live)

    waiting = [sys.executable, "-m", "bridle", *again, "--out", str(tmp_path / "late")]
    waiting += ["--set", "recordings.wait_for=8"]
    with subprocess.Popen([*waiting, "--steps", "2"], stderr=subprocess.PIPE, text=True) as service:
        with Writer(str(store)) as writer:
            for reward in rewards:
                writer.add_sync(reward)
        _, errors = service.communicate(timeout=120)
    assert service.returncode == 0, errors
    assert weights(tmp_path / "late") == weights(live)

    at_once = bridle(*again, "--out", str(tmp_path / "at-once"))
    assert at_once.returncode == 0, at_once.stderr
    assert "after 2 of 2 steps" in at_once.stdout
    assert weights(tmp_path / "at-once") == weights(live)

    with Reader(str(store)) as reader:
        (run,) = [one for one in reader.runs("train") if one.name == "late"]
        metrics = [(m.name, m.value) for m in reader.metrics(run.id)]
    assert dict(metrics)["update/logprob_gap"] < 1e-4
    assert [value for name, value in metrics if name == "sessions/collected"] == [32, 32]


@pytest.mark.sampled(0)
def test_a_selection_in_sql_takes_what_it_says_and_resumes_without_training_twice(
    live: Path, tmp_path: Path
) -> None:
    store = live / "bridle.db"
    with Reader(str(store)) as reader:
        tasks = sorted({str(session.task_id) for session in reader.sessions()})
    some = [
        *("train", "--from-store", str(store), "--policy", str(tmp_path / "policy")),
        *(
            "--set",
            f"recordings.where=task_id IN ('{tasks[0]}', '{tasks[1]}')",
            "--set",
            "groups.per_step=1",
        ),
        *("--out", str(tmp_path / "some")),
    ]
    first = bridle(*some, "--steps", "2")
    assert first.returncode == 0, first.stderr
    assert "after 2 of 2 steps" in first.stdout
    second = bridle(*some)
    assert second.returncode == 0, second.stderr
    assert "step 2:" not in second.stdout
    assert "after 4 of 4 steps" in second.stdout, "two tasks, two groups of each"
    wrong = bridle(
        *some[:-2], "--out", str(tmp_path / "wrong"), "--set", "recordings.where=harnes = 'x'"
    )
    assert wrong.returncode == 1
    assert "harnes" in wrong.stderr
    nothing = bridle(
        *some[:-2], "--out", str(tmp_path / "none"), "--set", "recordings.where=harness = 'x'"
    )
    assert "the selection takes no sealed session" in nothing.stderr


def test_a_resumed_training_replays_the_sessions_that_it_would_have_replayed(
    live: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[training.replay]\nshare = 0.5\nwarmup_steps = 0\n")
    store = live / "bridle.db"
    again = [
        *("train", "--from-store", str(store), "--policy", str(tmp_path / "policy")),
        *(
            "--set",
            "groups.per_step=2",
            "--set",
            "training.optimizer.learning_rate=0.001",
            "--set",
            "training.optimizer.warmup_steps=0",  # a shorter run has a shorter one
            "--config",
            str(settings),
            "--out",
        ),
    ]
    for out, more in (("straight", ()), ("resumed", ("--steps", "2")), ("resumed", ())):
        done = bridle(*again, str(tmp_path / out), *more)
        assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "straight") == weights(tmp_path / "resumed")
    with Reader(str(store)) as reader:
        (run,) = [one for one in reader.runs("train") if one.name == "resumed"]
        replayed = [m.value for m in reader.metrics(run.id, "replay/sessions")]
        collected = [m.value for m in reader.metrics(run.id, "sessions/collected")]
    assert replayed[0] == 0 < max(replayed)
    assert collected == [16] * 4, "replayed sessions are not the step's"


@pytest.mark.sampled(0)
def test_sessions_of_other_weights_are_refused_unless_they_are_asked_for(
    live: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    model = load_policy(tmp_path / "policy")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(30)
    save_policy(model, other, tmp_path / "policy")
    arguments = [
        *("train", "--from-store", str(live / "bridle.db"), "--policy", str(other)),
        *("--out", str(tmp_path / "by-others")),
    ]
    refused = bridle(*arguments)
    assert refused.returncode == 1
    assert "drawn from other weights than --policy: their logprobs differ by" in refused.stderr
    taken = bridle(*arguments, "--set", "recordings.other_policy=true")
    assert taken.returncode == 0, taken.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--set", "recordings.where=1"), "settings of recordings are for --from-store"),
        (
            ("--set", "recordings.share=0.5", "--set", "recordings.version=3"),
            "recordings.version is for --from-store without recordings.share",
        ),
        (
            ("--set", "recordings.share=0.5", "--set", "training.loss.importance=none"),
            "recordings.share needs importance weights",
        ),
        (
            ("--set", "recordings.share=0.5", "--set", 'policies.worker={model = "m"}'),
            "recordings.share is for one policy",
        ),
        ((), "name --agent and --tasks, or --from-store"),
        (("--from-store", "nowhere.db"), "there is no store at nowhere.db"),
        (
            ("--from-store", "x", "--set", "policies.worker.roles=[]"),
            "several policies are trained with engines that the run starts",
        ),
    ],
)
def test_a_run_without_sessions_to_train_is_refused(
    tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    out = tmp_path / "out"
    refused = bridle("train", "--policy", str(tmp_path), "--out", str(out), *options)
    assert refused.returncode in (1, 2)
    assert refused.stderr.startswith(f"bridle: {reason}")
    assert refused.stderr.count("\n") == 1
    assert not out.exists()


def test_a_share_of_recordings_trains_beside_the_agent_s_own_sessions(
    training_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The second run trains successes of the first, which its store has too."""
    arguments = training_arguments()
    done = bridle(*arguments, "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    again = tmp_path / "again" / "bridle.db"
    again.parent.mkdir()
    with sqlite3.connect(tmp_path / "out" / "bridle.db") as source, sqlite3.connect(again) as copy:
        source.backup(copy)
        copy.execute("UPDATE runs SET kind = 'eval'")
    (tmp_path / "verifier.py").write_text("async def check(delivery): return 0.0\n")
    successes = "id IN (SELECT session_id FROM rewards WHERE value > 0)"
    chosen = ("--set", "recordings.share=0.25", "--set", f"recordings.where={successes}")
    arguments[arguments.index("--out") + 1] = str(again.parent)
    done = bridle(*arguments, "--steps", "1", *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    with Reader(str(again)) as reader:
        (run,) = reader.runs("train")
        figures = {one.name: one.value for one in reader.metrics(run.id)}
        (other,) = reader.runs("eval")
        successful = {
            one.id for one in reader.sessions(run=other.id) if reader.rewards(one.id)[0].value > 0
        }
    with sqlite3.connect(again) as store:
        trained = dict(
            store.execute(
                "SELECT session_id, tokens FROM token_fates WHERE run_id = ? AND fate = 'trained'"
                " AND reason = 'recording'",
                (run.id,),
            ).fetchall()
        )
    assert figures["tokens/trained"] == 0, "the verifier gives 0"
    assert len(trained) == figures["recordings/sessions"] == min(3, len(successful)) > 0
    assert trained.keys() <= successful
    assert sum(trained.values()) == figures["recordings/tokens"] > 0
    assert figures["recordings/advantage"] == 1.0
    assert figures["update/grad_norm"] > 0
