"""The demo with SmolLM2-135M-Instruct: every stage once, shortened.

``make test-pretrained`` runs it whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.sandboxes.process import ProcessSandbox
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import Delivery
from bridle.run.examples import load_example

ROOT = Path(__file__).parents[2]
Command = Callable[..., Any]


def run(bridle: Command, directory: Path, *arguments: object) -> dict[str, Any]:
    done = bridle("demo", "--out", directory, *arguments, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stderr, done.stdout)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def require_conserved(bridle: Command, directory: Path, report: dict[str, Any]) -> None:
    assert report["model"] == "SmolLM2-135M-Instruct"
    assert report["harness"] == "langchain"
    assert report["tokens_captured"] == (
        report["tokens_trained"] + report["tokens_masked"] + report["tokens_dropped"]
    )
    assert report["logprob_gap"] <= 1e-3
    assert report["rows_per_session"] == 1
    audited = bridle("audit", "--store", directory / "bridle.db", "--json")
    assert audited.returncode == 0, audited.stdout[-2000:]
    assert json.loads(audited.stdout)["sessions"] == report["sessions"]


def test_no_sentence_is_in_both_splits() -> None:
    _, staff = load_example("staff_list")
    train, held_out = (
        {sentence for task in staff.tasks(split) for sentence in re.split(r"(?<=\.) ", task.prompt)}
        for split in ("train", "held_out")
    )
    assert len(held_out) >= 200
    assert not train & held_out


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Tailor. | baker", 1.0),
        ("tailor | Tom's job is a baker", 0.5 + 0.5 / 6),
        ("tailor | baker baker", 0.75),
        ("tailor | nurse", 0.5),
        ("tailor | baker or nurse", 0.5),
        ("Eva | Rome", 0.0),
        ("tailor", 0.0),
        ("", 0.0),
    ],
)
def test_a_place_scores_the_right_jobs_share_of_its_words(
    answer: str, score: float, tmp_path: Path
) -> None:
    _, staff = load_example("staff_list")
    task = Task(id="t", prompt="", payload={"jobs": ["tailor", "baker"]})
    delivered = Delivery(task, answer, tmp_path, 0, ProcessSandbox(tmp_path))
    assert staff.verifier(delivered) == pytest.approx(score)


@pytest.mark.pretrained
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_the_agent_gets_better_at_notes_it_has_not_seen(
    bridle: Command, tmp_path: Path, engine: str
) -> None:
    report = run(bridle, tmp_path / "run", "--engine", engine)
    assert report["reward_before_tasks"] >= 100
    assert report["reward_after_tasks"] >= 100
    assert report["reward_before"] <= 0.4
    assert report["reward_after"] >= 0.9
    assert report["minutes"] <= (12 if engine == "embedded" else 22)
    require_conserved(bridle, tmp_path / "run", report)


@pytest.fixture(scope="module")
def still(bridle: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that changes nothing."""
    directory = tmp_path_factory.mktemp("demo") / "run"
    arguments = ("--set", "learning_rate=0", "--steps", 2, "--set", "eval_tasks=8")
    report = run(bridle, directory, *arguments)
    assert report["greedy_after"] == report["greedy_before"]
    require_conserved(bridle, directory, report)
    return directory


@pytest.mark.demo
@pytest.mark.timeout(1200)
def test_without_a_learning_rate_nothing_is_learned(still: Path) -> None:
    weights = "model.safetensors"
    before, after = (still / "policy" / name / weights for name in ("warm", "trained"))
    assert after.read_bytes() == before.read_bytes()
