"""Rewards by HTTP and by the command line end in the same place, and in the export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import Result

from bridle.reconstruct import open_store
from bridle.reconstruct.rewards import Aggregation

Bridle = Callable[..., Result]


def test_late_many_and_turn_rewards_by_http_and_command_line(
    bridle: Bridle, store: str, recorded: str, proxy_url: str, tmp_path: Path
) -> None:
    odd = 0.1 + 0.2
    with open_store(store) as opened:
        session = opened.session(recorded)
    at = f"{proxy_url}/bridle/v1/sessions/{session.id}"
    assert httpx.post(f"{at}/seal", json={}).status_code == 200
    for new in (
        {"name": "score", "value": 0.25},
        {"name": "score", "value": odd},
        {"name": "step", "value": 1.0, "turn": 1},
    ):
        assert httpx.post(f"{at}/rewards", json=new).status_code == 201
    assert httpx.post(f"{at}/rewards", json={"name": "score", "value": "NaN"}).status_code == 422
    told = bridle("reward", recorded, "0", "--name", "step", "--turn", "2", "--store", store)
    assert told.exit_code == 0
    with open_store(store) as opened:
        session = opened.session(recorded)
        assert session.rewards == {"score": odd}
        ours = Aggregation({"score": 1.0, "step": 1.0}, turns="mean", sources=("operator",))
        assert session.reward(ours) == odd + 0.5
    path = tmp_path / "good.jsonl"
    turns = ("--rules", '{"turn_reward": "step", "min_turn_reward": 0.5}')
    written = json.loads(bridle("export", path, *turns, "--store", store, "--json").stdout)
    assert list(written["untrained_tokens"]) == ["turn_reward_too_low"]
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert [message["role"] for message in line["messages"]] == ["user", "assistant"]
    assert "weight" not in line["messages"][1]
    assert json.loads(Path(written["card"]).read_text())["rewards"]["score"]["max"] == odd


def test_a_reward_of_a_role_is_shown_with_it(bridle: Bridle, store: str, recorded: str) -> None:
    given = bridle(
        "reward", recorded, "0.5", "--name", "plan", "--role", "planner", "--store", store
    )
    assert given.exit_code == 0, given.stderr
    assert "reward plan = 0.5 (role planner)" in bridle("show", recorded, "--store", store).stdout
    two = bridle("reward", recorded, "1", "--role", "a", "--turn", "1", "--store", store)
    assert (two.exit_code, "has one place" in two.stderr) == (2, True)


@pytest.mark.parametrize("value", ["-1", "-0.5", "-1e-3"])
def test_a_reward_may_be_negative(bridle: Bridle, store: str, recorded: str, value: str) -> None:
    told = bridle("reward", recorded, value, "--name", "score", "--store", store)
    assert told.exit_code == 0, told.stderr
    with open_store(store) as opened:
        assert opened.session(recorded).rewards == {"score": float(value)}


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_reward_that_is_not_finite_is_refused_in_a_line(
    bridle: Bridle, store: str, recorded: str, value: str
) -> None:
    refused = bridle("reward", recorded, value, "--store", store)
    assert refused.exit_code == 2
    assert refused.stderr == f"bridle: a reward is a finite number, not {value}\n"


@pytest.mark.parametrize("length", [0, 129])
def test_a_reward_is_named_in_1_to_128_characters(
    bridle: Bridle, store: str, recorded: str, length: int
) -> None:
    refused = bridle("reward", recorded, 1, "--name", "x" * length, "--store", store)
    assert refused.exit_code == 2
    assert refused.stderr == f"bridle: a reward's name has 1 to 128 characters, not {length}\n"
    assert bridle("reward", recorded, 1, "--name", "x" * 128, "--store", store).exit_code == 0
    with open_store(store) as opened:
        assert opened.session(recorded).rewards == {"x" * 128: 1.0}


@pytest.mark.parametrize("given", [("1", "--nmae", "x"), ("--nope", "1"), ("-x",)])
def test_an_option_that_reward_does_not_have_is_refused(
    bridle: Bridle, store: str, recorded: str, given: tuple[str, ...]
) -> None:
    assert bridle("reward", recorded, *given, "--store", store).exit_code == 2
    with open_store(store) as opened:
        assert opened.session(recorded).rewards == {}


def test_each_format_and_the_split_are_on_the_command_line(
    bridle: Bridle, store: str, recorded: str, tmp_path: Path
) -> None:
    for form in ("trl", "trl-prompt-completion", "sharegpt", "adp", "atif", "chat", "tokens"):
        path = tmp_path / f"{form}.out"
        told = bridle("export", path, "--format", form, "--store", store, "--json")
        assert json.loads(told.stdout)["rows"] == (2 if form == "trl-prompt-completion" else 1)
        assert json.loads(path.with_name(path.name + ".card.json").read_text())["format"] == form
    path = tmp_path / "x.jsonl"
    told = bridle("export", path, "--eval-share", "1", "--store", store, "--json")
    train, held = json.loads(told.stdout)["files"]
    assert (train["rows"], held["rows"]) == (0, 1)
    assert held["path"].endswith("x.eval.jsonl")
    for wrong in (("--where", "nonesuch=1"), ("--builder", "nonesuch")):
        assert bridle("export", path, *wrong, "--store", store).exit_code == 2
