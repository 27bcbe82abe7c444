"""``bridle bench learning --pretrained``: what counts as learned, and the table.

Its runs take minutes. The loop that they run is the demo's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bridle.recipes.learning import pretrained
from bridle.recipes.learning.methods import METHODS, method
from bridle.recipes.learning.pretrained import CASES, bench_pretrained, reached_goal, table
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
        lambda case, settings, seed, device, say: steps[seed],
    )
    first, other = (
        bench_pretrained(method("grpo"), LearningSettings(seeds=1, first_seed=seed), "cpu", print)
        for seed in steps
    )
    assert (first, other) == ([256], [None])
    text = table(compared("demo", {"grpo": first, "other": other}), LearningSettings())
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
    found = pretrained.rewards_by_step(
        method("cispo"), LearningSettings(), 3, "cuda:1", lambda _: None
    )
    assert found == [0.95] * 3
    assert asked[0].loss.name == "cispo"
    assert asked[0].seed == 3
    assert asked[0].optimizer.learning_rate == pretrained.SETTINGS.learning_rate
    assert placed == [("--device", "cuda:1")]
    assert asked[0].compute.device == "cuda:1"
