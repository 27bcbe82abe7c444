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


@pytest.mark.parametrize("source", ["store", "parquet", "jsonl"])
def test_what_was_recorded_is_learned_from_any_source(
    bridle: Bridle, recorded: str, store: str, policy: Path, tmp_path: Path, source: str
) -> None:
    chosen: list[object] = ["--store", store]
    if source != "store":
        data = tmp_path / f"lamps.{source}"
        assert bridle("export", data, "--store", store).exit_code == 0
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


@pytest.mark.parametrize("source", ["store", "parquet"])
def test_ids_that_the_policy_does_not_have_are_said_in_a_line(
    bridle: Bridle, recorded: str, store: str, policy: Path, tmp_path: Path, source: str
) -> None:
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=1024)
    make_policy(policy, shape, vocab_size=64, seed=3)
    chosen: list[object] = ["--store", store]
    if source == "parquet":
        data = tmp_path / "lamps.parquet"
        assert bridle("export", data, "--store", store).exit_code == 0
        chosen += ["--data", data]
    done = bridle("sft", "--policy", policy, "--out", tmp_path / "tuned", *chosen)
    assert done.exit_code == 1
    assert re.fullmatch(
        r"bridle: token id \d+ is beyond the 64 of the model's vocabulary: "
        r"was this recorded with another model\?\n",
        done.stderr,
    )


def test_nothing_to_learn_is_said_and_nothing_is_written(
    bridle: Bridle, recorded: str, store: str, policy: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tuned"
    done = bridle("sft", "--policy", policy, "--out", out, "--store", store, "--min-reward", 0.5)
    assert done.exit_code == 1
    assert not out.exists()
