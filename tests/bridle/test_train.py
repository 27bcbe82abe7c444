"""``bridle train``: sessions, updates and publishing in one place, and going on where it ended."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from bridle.engine.contract.client import EngineRefused
from bridle.engine.embedded import EmbeddedEngine
from bridle.harnesses.episode import Outcome
from bridle.run.local import TrainingBegin
from bridle.run.stack import Stack
from bridle.run.training import train
from bridle.run.training_plan import TrainingPlan
from bridle.run.training_progress import TrainingProgress
from bridle.store.reading.queries import Reader
from bridle.store.records import RunRecord
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer
from bridle.trainer.config import ComputeConfig, GrpoConfig, LoraConfig, PublishConfig
from bridle.trainer.policy.compute import UnsupportedCompute
from support.processes import bridle

pytestmark = pytest.mark.usefixtures("warm_start")


VERIFIER = """
async def check(delivery):
    return {"reward": float(sum(map(ord, delivery.answer)) % 2)}
"""


@pytest.fixture
def arguments(training_arguments: Callable[..., list[str]]) -> list[str]:
    return training_arguments()


def no_sessions(_number: int, begun: Callable[[], None]) -> Future[Sequence[str]]:
    raise AssertionError("nothing is collected")


def work(arguments: list[str]) -> list[str]:
    """Return the part of ``arguments`` that names agent, tasks and verifier."""
    first = arguments.index("--agent")
    return arguments[first : first + 6]


def test_it_trains_publishes_and_goes_on_where_it_ended(
    arguments: list[str], tmp_path: Path
) -> None:
    first = bridle(*arguments, "--steps", "1")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "step 1: reward 0." in first.stdout
    assert " in 1 step\n" in first.stdout
    store = str(tmp_path / "out" / "bridle.db")
    assert f"look at it with: bridle viewer --store {store}" in first.stdout
    assert first.stdout.startswith("training ")
    assert "\nrun run_" in first.stdout
    assert "no session has a call" not in first.stderr
    again = bridle(*arguments, "--steps", "2", "--set", "training.compute.device=cpu,cpu")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "step 1:" not in again.stdout
    assert "step 2: reward 0." in again.stdout
    assert "checkpoints/step-00000002/policy: after 2 of 2 steps" in again.stdout
    with Reader(store) as reader:
        (run,) = reader.runs("train")
        sessions = list(reader.sessions(run=run.id))
        calls = [call for session in sessions for call in reader.calls(session.id)]
    assert len(sessions) == len(calls) == 2 * 2 * 6
    assert {call.version_start for call in calls} == {0, 1}
    assert bridle("audit", "--store", store).returncode == 0
    explained = bridle("doctor", run.id, "--store", store).stdout
    assert explained.startswith(("ERROR", "WARNING", "NOTE", f"run {run.id}: nothing is wrong"))
    assert again.stdout.endswith(explained)


def test_ctrl_c_says_how_to_go_on(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "bridle", *arguments, "--steps", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as run:
        assert run.stdout is not None
        begun = [run.stdout.readline() for _ in range(4)]
        run.send_signal(signal.SIGINT)
        _, error = run.communicate(timeout=120)
    assert begun[0].startswith("training ")
    assert "PyTorch is loaded first" in begun[0]
    assert begun[3].startswith("engine and proxy start; then 2 steps of 12 sessions")
    assert run.returncode == 130
    assert "Stopped. The same command resumes" in error
    assert "Traceback" not in error


def test_sessions_are_counted_on_the_way_to_a_step(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "a folder").mkdir()
    store = str(tmp_path / "a folder" / "bridle.db")
    migrate(store)
    now = [0.0]
    progress = TrainingProgress(5, lines.append, clock=lambda: now[0])
    progress.begin(TrainingBegin("run_x", store, 2, 64))
    assert lines[0] == f"run run_x, recorded to {store}, goes on after step 2"
    assert lines[1].endswith(f"bridle viewer --store '{store}'")
    assert "3 steps of 64 sessions" in lines.pop()
    for number in range(30):
        now[0] += 1
        progress.session_ended(None if number % 3 else 0.5)
    assert lines[2:] == [
        "step 3: 15 of 64 sessions, reward so far 0.500 (15 s, about 49 s left)",
        "step 3: 30 of 64 sessions, reward so far 0.500 (30 s, about 34 s left)",
    ]
    progress.step_ended(0, {"reward/mean": 0.5})
    now[0] += 20
    progress.session_ended(None)
    assert lines[4:] == [
        "about 60.0 s left for the rest of 5 steps",
        "step 4: 1 of 64 sessions, no reward yet (20 s, about 1260 s left)",
    ]


def test_a_collapse_is_printed_once_at_the_step_that_shows_it(tmp_path: Path) -> None:
    store = str(tmp_path / "bridle.db")
    migrate(store)
    steady = {"reward/mean": 0.5, "reward/min": 0.0, "reward/max": 1.0}
    sizes = [0.1] * 6 + [9.0] * 2
    lines: list[str] = []
    with Writer(store) as writer:
        writer.add_sync(RunRecord("run_x", "train", 0.0))
        for step, norm in enumerate(sizes[:4]):
            writer.record_metrics("run_x", step, {**steady, "update/grad_norm": norm})
    progress = TrainingProgress(9, lines.append)
    progress.begin(TrainingBegin("run_x", store, 4, 64))
    del lines[:]
    for step, norm in enumerate(sizes):
        if step >= 4:
            progress.step_ended(step, {**steady, "update/grad_norm": norm})
            assert sum(line.startswith("warning") for line in lines) == (step >= 7)
    lines = [line for line in lines if line.startswith("warning")]
    assert lines[0].startswith("warning: gradient_spikes: The gradients are far above")
    assert "Step 8: a norm of 0.1 → 9." in lines[0]


@pytest.mark.loop
@pytest.mark.sampled(0)
def test_a_step_whose_agent_called_nothing_says_where_to_look(
    arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text("print('no call')")
    done = bridle(*arguments, "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1: no session has a call (does the program read" in done.stderr
    assert "step 1 trains nothing: of 12 sessions 12 empty" in done.stderr


@pytest.mark.loop
def test_sessions_have_the_horizon_of_their_step(arguments: list[str], tmp_path: Path) -> None:
    horizon = ("--set", "groups.horizon=2", "--set", "groups.horizon_growth=3")
    phases = ("--set", "groups.horizon_every=1", "--set", "groups.weighted=true")
    done = bridle(*arguments, "--steps", "2", *horizon, *phases)
    assert done.returncode == 0, done.stderr
    with Reader(str(tmp_path / "out" / "bridle.db")) as reader:
        (run,) = reader.runs("train")
        calls = [one.settings["budget"]["calls"] for one in reader.sessions(run=run.id)]
    assert calls == [2] * 12 + [5] * 12


@pytest.mark.loop
def test_by_sessions_a_step_takes_those_that_have_siblings_and_goes_on_with_them(
    arguments: list[str], tmp_path: Path
) -> None:
    by_session = (
        *("--set", "training.collection=sessions", "--set", "training.max_staleness=1"),
        *("--set", "training.advantages.baseline=leave_one_out"),
        *("--set", "training.publish.pause_mode=keep"),
    )
    first = bridle(*arguments, "--steps", "2", *by_session)
    assert first.returncode == 0, first.stdout + first.stderr
    again = bridle(*arguments, "--steps", "3", *by_session)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "step 3: reward 0." in again.stdout
    store = str(tmp_path / "out" / "bridle.db")
    with Reader(store) as reader:
        (run,) = reader.runs("train")
        # One that a busy machine broke is an infrastructure failure, and is run again.
        groups = Counter(
            session.group_id
            for session in reader.sessions(run=run.id)
            if session.outcome == Outcome.COMPLETED
        )
    assert set(groups.values()) == {6}, "a group goes on with the sessions that it has"
    assert bridle("audit", "--store", store).returncode == 0


@pytest.mark.loop
def test_it_ends_when_its_time_is_over_and_not_before_the_first_step(
    arguments: list[str], tmp_path: Path
) -> None:
    done = bridle(
        *arguments,
        "--steps",
        "50",
        "--set",
        "training.seconds=0.06",
        "--set",
        "training.optimizer.schedule=cosine",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step ") == 1
    with Reader(str(tmp_path / "out" / "bridle.db")) as reader:
        (run,) = reader.runs("train")
    settings = run.config["settings"]
    assert settings["seconds"] == pytest.approx(0.06)
    assert settings["optimizer"]["schedule"] == "cosine"


SETTINGS = """
[training]
steps = 1
[training.compute]
precision = "bfloat16"
recompute = true
[training.loss]
name = "cispo"
kl_coefficient = 0.1
"""


@pytest.mark.loop
def test_a_settings_file_reaches_the_model_the_loss_and_the_store(
    arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "settings.toml").write_text(SETTINGS)
    done = bridle(
        *arguments,
        *("--config", str(tmp_path / "settings.toml"), "--set", "training.minibatches=2"),
        *("--set", "training.lora.rank=4"),
        # A step that outlasts bfloat16's rounding, and more live groups than one.
        *("--set", "training.optimizer.learning_rate=0.05", "--set", "groups.per_step=4"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after 1 of 1 steps" in done.stdout
    with Reader(str(tmp_path / "out" / "bridle.db")) as reader:
        (run,) = reader.runs("train")
        metrics = {metric.name: metric.value for metric in reader.metrics(run.id)}
        (policy,) = [each for each in reader.policies(run.id) if each.version == 1]
    settings = run.config["settings"]
    assert settings["loss"]["name"] == "cispo"
    assert settings["lora"]["rank"] == 4
    assert settings["compute"] == {"device": "auto", "precision": "bfloat16", "recompute": True}
    # Of the second minibatch: the first begins at the reference.
    assert metrics["update/kl_reference"] > 0
    assert policy.verified
    # The engine computes in float32, the trainer did not.
    assert policy.logprob_gap is not None
    assert policy.logprob_gap > 1e-5


def test_the_engine_gets_the_options_meant_for_it(arguments: list[str]) -> None:
    refused = bridle(
        *arguments, "--set", 'policy.engine_arguments=["--max-model-len=4", "--nonsense"]'
    )
    assert refused.returncode == 1
    assert "--max-model-len=4 --nonsense` did not start" in refused.stderr
    assert "No such option: --nonsense" in refused.stderr


def test_a_device_that_is_not_here_ends_it_before_anything_starts(
    arguments: list[str], tmp_path: Path
) -> None:
    refused = bridle(*arguments, "--set", "training.compute.device=cuda:77")
    assert refused.returncode == 1
    assert "no device 'cuda:77'" in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.loop
@pytest.mark.sampled(0)
def test_weights_are_transferred_from_one_device_only(arguments: list[str], tmp_path: Path) -> None:
    several = [
        *arguments,
        "--set",
        "training.compute.device=cpu,cpu",
        "--set",
        "policy.engine=vllm",
    ]
    refused = bridle(*several, "--set", "training.publish.through=transfer")
    assert refused.returncode == 1
    assert "weights are transferred from one device" in refused.stderr
    assert not (tmp_path / "out").exists(), "said before an engine is started"
    services = Stack("http://engine", "http://proxy", kind="vllm")
    config = GrpoConfig(
        publish=PublishConfig(through="transfer"), compute=ComputeConfig(device="cpu,cpu")
    )
    plan = TrainingPlan(tmp_path, tmp_path / "out", str(tmp_path / "bridle.db"), "run", config)
    with pytest.raises(UnsupportedCompute, match="transferred from one device"):
        train(plan, services, no_sessions, on_step=lambda _report: None)


def test_adapters_are_published_to_one_vllm_only(arguments: list[str], tmp_path: Path) -> None:
    def refused(*more: str) -> str:
        done = bridle(*arguments, "--set", "training.publish.through=lora", *more)
        assert done.returncode == 2
        assert not (tmp_path / "out").exists()
        return " ".join(done.stderr.split())

    rank = ("--set", "training.lora.rank=4")
    assert "set training.lora.rank" in refused()
    assert "to a vLLM only: add --engine vllm" in refused(*rank)
    urls = ("--engine-url", "http://one", "--engine-url", "http://two")
    assert "give one --engine-url" in refused(*rank, *urls)
    lora = GrpoConfig(lora=LoraConfig(rank=4), publish=PublishConfig(through="lora"))
    store = str(tmp_path / "bridle.db")
    migrate(store)
    plan = TrainingPlan(tmp_path / "policy", tmp_path / "out", store, "run", lora)
    for services in (
        Stack("http://engine", "http://proxy", kind="embedded"),
        Stack("http://engine", "http://proxy", kind="vllm", more_engines=("http://another",)),
    ):
        with pytest.raises(EngineRefused, match="adapters are published to one vLLM"):
            train(plan, services, no_sessions, on_step=lambda _report: None)


def test_weights_are_transferred_to_a_vllm_only(arguments: list[str], tmp_path: Path) -> None:
    refused = bridle(*arguments, "--set", "training.publish.through=transfer")
    assert refused.returncode == 2
    assert "weights are transferred to a vLLM only" in refused.stderr
    assert not (tmp_path / "out").exists()
    services = Stack("http://engine", "http://proxy", kind="embedded")
    plan = TrainingPlan(
        policy=tmp_path / "policy",
        directory=tmp_path / "out",
        store=str(tmp_path / "bridle.db"),
        run_id="run",
        config=GrpoConfig(publish=PublishConfig(through="transfer")),
    )
    migrate(plan.store)
    with pytest.raises(EngineRefused, match="http://engine is not a vLLM"):
        train(plan, services, no_sessions, on_step=lambda _report: None)


def test_a_source_without_tasks_is_said_before_anything_starts(
    arguments: list[str], tmp_path: Path
) -> None:
    refused = bridle(*arguments, "--set", "tasks.split=held_out")
    assert refused.returncode == 2
    assert "gives no task of split 'held_out'" in " ".join(refused.stderr.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lacks", ["a model", "a sound configuration", "a tokenizer"])
def test_a_policy_that_is_none_is_said_before_anything_starts(
    arguments: list[str], tmp_path: Path, lacks: str
) -> None:
    policy = tmp_path / "policy"
    if lacks == "a sound configuration":
        config = json.loads((policy / "config.json").read_text())
        (policy / "config.json").write_text(json.dumps(config | {"hidden_size": "32"}))
    else:
        (policy / ("config.json" if lacks == "a model" else "tokenizer.json")).unlink()
    refused = bridle(*arguments, "--set", "training.lora.rank=4")
    assert refused.returncode == 1
    notice = "set training.optimizer.learning_rate to 10 to 100 times that"
    assert notice not in refused.stdout, "the arguments set a rate"
    kind = "tokenizer" if lacks == "a tokenizer" else "loadable causal LM"
    assert refused.stderr.startswith(f"bridle: no {kind} in {policy}: ")
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_agent_that_cannot_be_started_is_said_before_anything_starts(
    arguments: list[str], tmp_path: Path
) -> None:
    agent = f"{sys.executable} {{prompt}} {{promt}}"
    refused = bridle(*arguments, "--agent", agent)
    assert refused.returncode == 1
    assert refused.stderr.startswith("bridle: '{promt}': unknown placeholder 'promt'; ")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl" / "out"
    refused = bridle(*arguments, "--out", str(out))
    assert refused.returncode == 2
    assert refused.stderr == f"bridle: cannot write to --out {out}: Not a directory\n"


@pytest.mark.loop
@pytest.mark.sampled(0)
def test_a_folder_is_trained_in_by_one_command_at_a_time(
    arguments: list[str], tmp_path: Path
) -> None:
    out, verifier = tmp_path / "out", tmp_path / "verifier.py"
    verifier.write_text(
        "import time\n" + VERIFIER.replace("    return", "    time.sleep(300)\n    return")
    )
    first = subprocess.Popen([sys.executable, "-m", "bridle", *arguments], start_new_session=True)
    try:
        while not (out / "sessions").exists():
            assert first.poll() is None
            time.sleep(0.1)
        services = ("--engine-url", "http://127.0.0.1:9", *work(arguments))
        elsewhere = (
            "--policy",
            str(tmp_path / "policy"),
            "--set",
            f"services.store={out / 'bridle.db'}",
        )
        for other in (arguments, ["train", *elsewhere, *services, "--out", str(out)]):
            refused = bridle(*other)
            assert refused.returncode == 1
            assert refused.stderr == (
                f"bridle: another command is writing to {out}: let it end, or name another --out\n"
            )
    finally:
        first.kill()
        first.wait()
    verifier.write_text(VERIFIER)
    again = bridle(*arguments, "--steps", "1")
    assert again.returncode == 0, again.stderr
    assert not (out / ".lock").exists()


@pytest.mark.parametrize("down", ["proxy", "engine"])
def test_a_trainer_names_the_service_that_is_down(
    arguments: list[str], tmp_path: Path, down: str
) -> None:
    policy, store = tmp_path / "policy", str(tmp_path / "bridle.db")
    migrate(store)
    nowhere = "http://127.0.0.1:9"
    with EmbeddedEngine(policy) as engine:
        serving = nowhere if down == "engine" else engine.base_url
        done = bridle(
            *("train", "--policy", str(policy), "--out", str(tmp_path / "out")),
            *("--engine-url", serving, "--proxy-url", nowhere),
            *("--set", f"services.store={store}", *work(arguments)),
        )
    assert done.returncode == 1
    assert done.stderr.startswith(f"bridle: the {down} does not answer at {nowhere}/")
    assert "the same command resumes from the last step" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.loop
@pytest.mark.sampled(0)
def test_keys_for_services_elsewhere_do_not_shut_it_out_of_its_own(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BRIDLE_ENGINE_API_KEY", "BRIDLE_UPSTREAM_API_KEY", "BRIDLE_ADMIN_KEY"):
        monkeypatch.setenv(name, "a-key")
    done = bridle(*arguments, "--steps", "1")
    assert done.returncode == 0, done.stderr


DAMAGING_VERIFIER = """
import sqlite3

damaged = []

async def check(delivery):
    if not damaged:
        with sqlite3.connect("STORE", timeout=30) as database:
            damaged.append(database.execute("SELECT call_id FROM spans LIMIT 1").fetchone()[0])
            database.execute("DELETE FROM spans WHERE call_id = ? AND choice = -1", damaged)
    return {"reward": float(sum(map(ord, delivery.answer)) % 2)}
"""


@pytest.mark.damages_store
@pytest.mark.loop
def test_a_session_that_contradicts_itself_is_left_out_counted_and_named(
    arguments: list[str], tmp_path: Path
) -> None:
    store = str(tmp_path / "out" / "bridle.db")
    (tmp_path / "verifier.py").write_text(DAMAGING_VERIFIER.replace("STORE", store))
    done = bridle(*arguments, "--steps", "1")
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(store) as database:
        broken, tokens = database.execute(
            "SELECT session_id, sampled_tokens FROM calls"
            " WHERE id NOT IN (SELECT call_id FROM spans WHERE choice = -1)"
        ).fetchone()
    assert done.stderr.count(f"session {broken} contradicts itself and is not trained on: ") == 1
    with Reader(store) as reader:
        (run,) = reader.runs("train")
        told = {metric.name: metric.value for metric in reader.metrics(run.id)}
    assert told["tokens/dropped/tree_broken"] == tokens
    assert told["sessions/collected"] == 12
