"""``bridle sft`` learns from the store and from either export of it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from engine.tokenizer import Tokenizer
from trainer.model import load_policy, vocabulary_size
from trainer.tiny import TinyShape, make_policy

Bridle = Callable[..., Result]


@pytest.fixture
def policy(model_dir: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "policy"
    shutil.copytree(model_dir, directory)
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=1024)
    make_policy(directory, shape, vocab_size=1024, seed=3)
    return directory


@pytest.mark.parametrize("source", ["store", "tokens", "chat", "trl"])
def test_what_was_recorded_is_learned_from_any_source(
    bridle: Bridle, recorded: str, store: str, policy: Path, tmp_path: Path, source: str
) -> None:
    chosen: list[object] = ["--store", store]
    if source != "store":
        data = tmp_path / ("lamps.parquet" if source == "tokens" else "lamps.jsonl")
        assert bridle("export", data, "--format", source, "--store", store).exit_code == 0
        chosen += ["--data", data]
    out = tmp_path / "tuned"
    learning = ["--epochs", 30, "--learning-rate", 0.01]
    done = bridle("sft", "--policy", policy, "--out", out, *chosen, *learning)
    assert done.exit_code == 0, done.output
    found = re.search(r"30 updates, loss ([\d.]+) → ([\d.]+)", " ".join(done.output.split()))
    assert found is not None, done.output
    assert float(found[2]) < 0.5 * float(found[1])
    assert vocabulary_size(load_policy(out)) == 1024
    assert Tokenizer(out).encode("The answer") == Tokenizer(policy).encode("The answer")


def test_nothing_to_learn_is_said_and_nothing_is_written(
    bridle: Bridle, recorded: str, store: str, policy: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tuned"
    done = bridle("sft", "--policy", policy, "--out", out, "--store", store, "--min-reward", 0.5)
    assert done.exit_code == 1
    assert not out.exists()


def test_what_cannot_be_learned_of_an_export_is_said_and_the_rest_is_learned(
    bridle: Bridle, recorded: str, store: str, policy: Path, tmp_path: Path
) -> None:
    data = tmp_path / "lamps.jsonl"
    assert bridle("export", data, "--store", store).exit_code == 0
    line = data.read_text()
    data.write_text(line + line.replace(r"{\"a\"", r"{\"a"))
    done = bridle("sft", "--policy", policy, "--out", tmp_path / "tuned", "--data", data)
    assert done.exit_code == 0, done.output
    assert "left out: 1 tool_arguments_not_json" in done.stdout
