"""The demo with the tiny policy that calls tools, whole and against its bars."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bridle.run.examples import load_example

pytestmark = [pytest.mark.demo, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
HELD_OUT = 100


@pytest.fixture(scope="module")
def demo(bridle: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished demo run."""
    directory = tmp_path_factory.mktemp("demo") / "run"
    done = bridle("demo", "--policy", "tiny", "--out", directory)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    print(done.stdout)
    return directory


@pytest.fixture(scope="module")
def report(demo: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((demo / "report.json").read_text())
    return found


def test_the_agent_gets_better_at_questions_it_has_not_seen(report: dict[str, Any]) -> None:
    assert report["reward_before_tasks"] >= HELD_OUT
    assert report["reward_after_tasks"] >= HELD_OUT
    assert report["reward_before"] <= 0.6
    assert report["reward_after"] >= 0.9
    assert report["gain"] == report["reward_after"] - report["reward_before"]
    assert report["minutes"] <= 12


def test_the_report_says_which_agent_was_trained(report: dict[str, Any]) -> None:
    assert report["model"] == "tiny"
    assert report["harness"] == "langchain"
    assert report["harness_version"] == version("langchain")


def test_held_out_questions_are_not_in_the_training_questions() -> None:
    _, shop = load_example("shop_agent")
    train, held_out = ({task.prompt for task in shop.tasks(s)} for s in ("train", "held_out"))
    assert len(held_out) >= HELD_OUT
    assert not train & held_out


def test_every_sampled_token_is_accounted_for(
    bridle: Callable[..., Any], demo: Path, report: dict[str, Any]
) -> None:
    assert report["tokens_captured"] > 0
    assert report["tokens_captured"] == (
        report["tokens_trained"] + report["tokens_masked"] + report["tokens_dropped"]
    )
    audited = bridle("audit", "--store", demo / "bridle.db", "--json")
    assert audited.returncode == 0, audited.stdout[-2000:]
    assert json.loads(audited.stdout)["sessions"] == report["sessions"]


def test_engine_and_trainer_agree_on_what_was_sampled(report: dict[str, Any]) -> None:
    assert report["logprob_gap"] <= 1e-3
    assert 0 < report["versions"] <= report["steps"]


def test_the_plot_is_a_picture(demo: Path) -> None:
    assert (demo / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_running_it_again_shows_the_finished_run_at_once(
    bridle: Callable[..., Any], demo: Path
) -> None:
    before = (demo / "report.json").read_bytes()
    started = time.monotonic()
    again = bridle("demo", "--policy", "tiny", "--out", demo, "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout) == json.loads(before)
    assert time.monotonic() - started < 30


def test_without_a_learning_rate_nothing_is_learned(
    bridle: Callable[..., Any], demo: Path, tmp_path: Path
) -> None:
    still = tmp_path / "still"
    arguments = (
        "--policy",
        "tiny",
        "--start-from",
        demo,
        "--set",
        "learning_rate=0",
        "--steps",
        2,
        "--set",
        "eval_tasks=150",
    )
    done = bridle("demo", "--out", still, *arguments, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    weights = "model.safetensors"
    assert (still / "policy/trained" / weights).read_bytes() == (
        demo / "policy/warm" / weights
    ).read_bytes()
    assert report["greedy_after"] == report["greedy_before"]
    low, high = report["reward_before_interval"]
    assert low - 0.1 <= report["reward_after"] <= high + 0.1


def test_an_interrupted_run_goes_on_where_it_was(
    bridle: Callable[..., Any], demo: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "stopped"
    command = [sys.executable, "-m", "bridle", "demo", "--policy", "tiny"]
    command += ["--out", str(directory)]
    command += ["--start-from", str(demo), "--steps", "2", "--set", "eval_tasks=8"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1:"):
            process.send_signal(signal.SIGINT)
            break
    process.stdout.read()
    assert process.wait(60) == 130
    assert bridle("audit", "--store", directory / "bridle.db").returncode == 0
    done = bridle(*command[3:], "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 1:" not in done.stderr
    assert json.loads(done.stdout)["steps"] == 2
