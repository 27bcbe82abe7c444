"""``bridle bench learning --pretrained``: what counts as learned, and the table.

Its runs take minutes. The loop that they run is the demo's.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from bridle.cli.program import app
from bridle.recipes.demo.course import StaffList
from bridle.recipes.demo.settings import PRETRAINED
from bridle.recipes.learning import pretrained
from bridle.recipes.learning.methods import METHODS, method
from bridle.recipes.learning.pretrained import (
    CASES,
    bench_pretrained,
    demo_settings,
    reached_goal,
    table,
)
from bridle.recipes.learning.runs import LearningSettings, compared


def test_the_cases_are_known() -> None:
    assert set(CASES) <= {one.name for one in METHODS}


def test_the_goal_is_a_mean_over_the_last_steps() -> None:
    settings = LearningSettings()
    assert not reached_goal([1.0, 1.0], settings)
    assert not reached_goal([1.0, 0.8, 0.8, 1.0], settings)
    assert reached_goal([0.0, 0.8, 0.9, 1.0], settings)


def test_sessions_are_counted_until_the_goal_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {0: [0.5, 0.9, 0.9, 0.9], 7: [0.5, 0.6]}
    monkeypatch.setattr(
        pretrained,
        "rewards_by_step",
        lambda case, settings, demo, say: steps[demo.seed],
    )
    demo = demo_settings(8, 8)
    first, other = (
        bench_pretrained(method("grpo"), LearningSettings(seeds=1, first_seed=seed), demo, print)
        for seed in steps
    )
    assert (first, other) == ([256], [None])
    text = table(compared("demo", {"grpo": first, "other": other}), LearningSettings(), demo)
    assert "8 groups of 8 sessions a step, AdamW at 2e-05, seeds from 0\non." in text
    assert "| grpo | 256 | 256 | 1.00 |" in text
    assert "| other | not reached | not reached |  |" in text


def test_a_case_changes_the_demos_credit_and_loss_and_stops_at_the_goal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    asked: list[Any] = []

    def train_policy(*arguments: Any) -> None:
        *_, config, _run, _on_session, on_step = arguments
        asked.append(config)
        while not on_step(SimpleNamespace(reward_mean=0.95)):
            pass

    class Running:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(pretrained, "train_policy", train_policy)
    placed: list[Any] = []

    def stack(*_: Any, engine_arguments: Any) -> Running:
        placed.append(engine_arguments)
        return Running()

    monkeypatch.setattr(pretrained, "stack", stack)
    monkeypatch.setattr(pretrained, "smollm2_directory", lambda: tmp_path)
    demo = replace(demo_settings(4, 4, "cuda:1"), seed=3)
    found = pretrained.rewards_by_step(method("cispo"), LearningSettings(), demo, lambda _: None)
    assert found == [0.95] * 3
    assert asked[0].loss.name == "cispo"
    assert asked[0].seed == 3
    assert asked[0].optimizer.learning_rate == PRETRAINED.learning_rate
    assert asked[0].steps == 80, "as many sessions as in the demo's steps of 8 groups of 8"
    assert asked[0].seconds is None, "the rate does not follow the machine's speed"
    assert placed == [("--device", "cuda:1")]
    assert asked[0].compute.device == "cuda:1"


def test_a_step_of_another_size_is_refused_if_it_is_no_size() -> None:
    refused = CliRunner().invoke(
        app, ["bench", "learning", "--pretrained", "--step", "16"], terminal_width=200
    )
    assert refused.exit_code == 2
    assert "--step 16: write groups and their size, such as 4x4" in refused.output


def test_the_staff_lists_hint_names_the_answers_in_order() -> None:
    task = StaffList().tasks("train", 1)[0]
    first, second = task.payload["jobs"]
    assert task.payload["hint"] == f"The answers are: {first}, then {second}."
