"""``bridle doctor`` names what is broken, and what the template does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

from engine.contract import MISSING_LOGPROB
from engine.scripted import Reply, ScriptedEngine
from store.database import migrate

Bridle = Callable[..., Result]


def test_everything_in_place_is_said_in_words(bridle: Bridle, model_dir: Path, store: str) -> None:
    with ScriptedEngine(model_dir, lambda _: "four", served_model_name="policy") as engine:
        result = bridle(
            "doctor", "--model", model_dir, "--upstream", engine.base_url, "--store", store
        )
    assert result.exit_code == 0, result.output
    assert "history is prefix-preserving: yes" in result.output
    assert "tails are local: yes" in result.output
    assert "takes exact prompts" in result.output
    assert "newest schema" in result.output


def test_json_carries_the_whole_verdict(bridle: Bridle, model_dir: Path, store: str) -> None:
    with ScriptedEngine(model_dir, lambda _: "four", served_model_name="policy") as engine:
        result = bridle(
            "doctor",
            "--model",
            model_dir,
            "--upstream",
            engine.base_url,
            "--store",
            store,
            "--json",
        )
    found = json.loads(result.output)
    assert found["broken"] == []
    assert found["engine"]["token_ids"]
    assert found["engine"]["logprobs"]
    assert found["engine"]["exact_prompts"]
    assert found["store"]["migrated"]
    assert found["template"]["thinking"] == "kept"
    assert found["template"]["arguments_reserialised"]


def test_an_engine_that_is_not_there_is_broken(bridle: Bridle, store: str) -> None:
    result = bridle("doctor", "--upstream", "http://127.0.0.1:9", "--store", store)
    assert result.exit_code == 1
    assert "does not answer" in result.output


def test_an_engine_without_logprobs_is_broken(bridle: Bridle, model_dir: Path, store: str) -> None:
    with ScriptedEngine(model_dir, lambda _: Reply("four", logprob=MISSING_LOGPROB)) as engine:
        result = bridle("doctor", "--upstream", engine.base_url, "--store", store)
    assert result.exit_code == 1
    assert "does not give logprobs" in result.output


def test_a_directory_without_a_tokenizer_is_broken(
    bridle: Bridle, store: str, tmp_path: Path
) -> None:
    result = bridle("doctor", "--model", tmp_path, "--store", store)
    assert result.exit_code == 1
    assert "no tokenizer there" in result.output


def test_a_directory_without_a_template_is_broken(
    bridle: Bridle, store: str, tmp_path: Path, model_dir: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    result = bridle("doctor", "--model", tmp_path, "--store", store)
    assert result.exit_code == 1
    assert "has no chat template" in result.output


def test_a_store_of_another_schema_is_broken_and_one_not_there_yet_is_not(
    bridle: Bridle, tmp_path: Path
) -> None:
    old = str(tmp_path / "old.db")
    migrate(old)
    migrate(old, "base")
    assert bridle("doctor", "--store", old).exit_code == 1
    fresh = tmp_path / "fresh.db"
    assert bridle("doctor", "--store", fresh).exit_code == 0
    assert not fresh.exists()
    (tmp_path / "text.db").write_text("this is no database, " * 100)
    assert "cannot be reached" in bridle("doctor", "--store", tmp_path / "text.db").output
