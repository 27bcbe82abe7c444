"""``bridle sft`` learns from the store and from exports of it."""

from __future__ import annotations

import fcntl
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import Result

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.scripted import ScriptedCall, ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.reconstruct.exports.formats import EXPORTS
from bridle.trainer.policy.model import load_policy, vocabulary_size
from bridle.trainer.sft.data import examples_from_jsonl, examples_from_parquet

Bridle = Callable[..., Result]

READABLE = ("tokens", "chat", "trl", "trl-prompt-completion")

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def policy(model_dir: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "policy"
    shutil.copytree(model_dir, directory)
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=1024)
    make_policy(directory, shape, vocab_size=1024, seed=3)
    return directory


@pytest.mark.parametrize("source", ["store", *READABLE])
def test_what_was_recorded_is_learned_from_any_source(
    bridle: Bridle, recorded: str, store: str, policy: Path, tmp_path: Path, source: str
) -> None:
    chosen: list[object] = ["--store", store]
    if source != "store":
        data = tmp_path / "lamps.of.any.name"
        assert bridle("export", data, "--format", source, "--store", store).exit_code == 0
        chosen += ["--data", data]
    out = tmp_path / "tuned"
    learning = ["--set", "epochs=30", "--set", "optimizer.learning_rate=0.01"]
    done = bridle("sft", "--policy", policy, "--out", out, *chosen, *learning)
    assert done.exit_code == 0, done.output
    found = re.search(r"30 updates, loss ([\d.]+) → ([\d.]+)", " ".join(done.output.split()))
    assert found is not None, done.output
    assert float(found[2]) < 0.5 * float(found[1])
    assert vocabulary_size(load_policy(out)) == 1024
    assert Tokenizer(out).encode("The answer") == Tokenizer(policy).encode("The answer")
    assert [path.name for path in out.parent.glob(".*.tmp")] == []


OTHERS = set(EXPORTS.names()) - {*READABLE, "preference", "preference-labels", "replay"}


@pytest.mark.parametrize("form", sorted(OTHERS))
def test_an_export_that_is_not_learned_from_is_refused_in_a_line(
    bridle: Bridle, recorded: str, store: str, policy: Path, tmp_path: Path, form: str
) -> None:
    data = tmp_path / "lamps.of.any.name"
    assert bridle("export", data, "--format", form, "--store", store).exit_code == 0
    done = bridle("sft", "--policy", policy, "--out", tmp_path / "tuned", "--data", data)
    assert done.exit_code == 1
    fault = "neither messages nor a prompt with its completion"
    if form == "csv":
        fault = "neither Parquet nor JSON (Expecting value: line 1 column 1 (char 0))"
    assert done.stderr == (
        f"bridle: {data}:1: {fault}; "
        f"exports as {', '.join(READABLE[:-1])} and {READABLE[-1]} can be learned from\n"
    )


@pytest.mark.parametrize("kind", ["policy", "file"])
def test_what_is_there_already_is_not_written_over(
    bridle: Bridle, recorded: str, store: str, policy: Path, tmp_path: Path, kind: str
) -> None:
    out = policy if kind == "policy" else tmp_path / "notes.txt"
    if kind == "file":
        out.write_text("mine")
    before = {path: path.read_bytes() for path in out.rglob("*")} or out.read_bytes()
    done = bridle("sft", "--policy", policy, "--out", out, "--store", store)
    assert done.exit_code == 2
    assert "name another --out" in " ".join(done.output.split())
    assert before == ({path: path.read_bytes() for path in out.rglob("*")} or out.read_bytes())


def test_a_model_is_made_by_one_command_at_a_time(
    bridle: Bridle, recorded: str, store: str, policy: Path, tmp_path: Path
) -> None:
    making = ("sft", "--policy", policy, "--out", tmp_path / "models" / "tuned", "--store", store)
    lock = tmp_path / "models" / ".tuned.lock"
    lock.parent.mkdir()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused = bridle(*making)
    assert refused.exit_code == 1
    assert "another command is writing to" in refused.stderr
    done = bridle(*making)
    assert done.exit_code == 0, done.output
    assert [path.name for path in lock.parent.iterdir()] == ["tuned"]


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


def test_only_rewards_of_the_named_sources_choose_the_sessions(
    bridle: Bridle, recorded: str, store: str, policy: Path, tmp_path: Path
) -> None:
    assert bridle("reward", recorded, 1.0, "--store", store).exit_code == 0
    learn = ("sft", "--policy", policy, "--out", tmp_path / "tuned", "--store", store)
    learn += ("--min-reward", 0.5)
    assert bridle(*learn, "--reward-source", "verifier").exit_code == 1, "an operator gave it"
    done = bridle(*learn)
    assert done.exit_code == 0, done.output


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


@pytest.mark.damages_store
def test_a_session_that_contradicts_itself_is_left_out_and_counted(
    bridle: Bridle, recorded: str, proxy_url: str, store: str, policy: Path, tmp_path: Path
) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "What is 3 plus 3?"}]}
    chat = f"{proxy_url}/s/other/v1/chat/completions"
    httpx.post(chat, json=asked, timeout=60).raise_for_status()
    with sqlite3.connect(store) as database:
        (first,) = database.execute("SELECT id FROM calls ORDER BY started_at").fetchone()
        database.execute("DELETE FROM spans WHERE call_id = ? AND choice = -1", (first,))
    done = bridle("sft", "--policy", policy, "--out", tmp_path / "tuned", "--store", store)
    assert done.exit_code == 0, done.output
    assert "left out: 1 session_broken" in done.stdout


def thinks(request: ScriptedRequest) -> ScriptedReply:
    """Thinks aloud, calls a tool, and thinks again."""
    if request.messages[-1]["role"] == "tool":
        return ScriptedReply("Done.", reasoning="An easy one.")
    return ScriptedReply(
        "Adding.", reasoning="2 plus 3?", tool_calls=(ScriptedCall("add", {"a": 2}),)
    )


@pytest.mark.parametrize("form", ["chat", "trl", "trl-prompt-completion"])
def test_a_thinking_session_is_rendered_to_the_ids_that_were_sampled(
    bridle: Bridle, model_dir: Path, store: str, tmp_path: Path, form: str
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 plus 3?"}]
    with (
        ScriptedEngine(model_dir, thinks, served_model_name="policy") as engine,
        ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=model_dir)) as proxy,
    ):
        for _ in range(2):
            ask = {"model": "m", "messages": messages, "tools": [ADD]}
            told = httpx.post(f"{proxy.base_url}/s/sums/v1/chat/completions", json=ask, timeout=60)
            messages.append(told.raise_for_status().json()["choices"][0]["message"])
            for call in messages[-1].get("tool_calls") or ():
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "5"})
    tokens, text = tmp_path / "sums.parquet", tmp_path / "sums.jsonl"
    assert bridle("export", tokens, "--store", store).exit_code == 0
    assert bridle("export", text, "--format", form, "--store", store).exit_code == 0
    (sampled,) = examples_from_parquet(tokens)
    rendered = examples_from_jsonl(text, Tokenizer(model_dir), Counter())
    assert len(rendered) == (2 if form == "trl-prompt-completion" else 1)
    assert rendered[-1].token_ids.tolist() == sampled.token_ids.tolist()
    learned = np.concatenate([np.flatnonzero(example.mask) for example in rendered])
    assert learned.tolist() == np.flatnonzero(sampled.mask).tolist()


def test_a_completed_prompt_is_tokenised_to_the_ids_that_were_sampled(
    bridle: Bridle, proxy_url: str, model_dir: Path, store: str, tmp_path: Path
) -> None:
    asked = {"model": "m", "prompt": "What is 2 plus 3?"}
    httpx.post(f"{proxy_url}/s/sums/v1/completions", json=asked, timeout=60).raise_for_status()
    tokens, text = tmp_path / "sums.parquet", tmp_path / "sums.jsonl"
    assert bridle("export", tokens, "--store", store).exit_code == 0
    form = ("--format", "trl-prompt-completion")
    assert bridle("export", text, *form, "--store", store).exit_code == 0
    (sampled,) = examples_from_parquet(tokens)
    (told,) = examples_from_jsonl(text, Tokenizer(model_dir), Counter())
    assert told.token_ids.tolist() == sampled.token_ids.tolist()
    assert told.mask.tolist() == sampled.mask.tolist()
