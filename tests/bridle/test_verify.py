"""``bridle verify`` passes the same engine, and finds a changed weight and a changed tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import Result

from bridle.engine.embedded import EmbeddedEngine
from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny import tiny_directory

Bridle = Callable[..., Result]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_directory(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def recorded_with(policy: Path, store: str) -> None:
    """A session of two turns and one of a temperature of its own, by the policy itself."""
    with EmbeddedEngine(policy) as engine:
        settings = ProxySettings(engine.base_url, f"sqlite:///{store}", tokenizer_dir=policy)
        with ProxyServer(settings) as proxy:
            messages = [{"role": "user", "content": "Which number?"}]
            for _ in range(2):
                said = ask(proxy.base_url, "plain", messages)
                messages += [said, {"role": "user", "content": "And then?"}]
            ask(proxy.base_url, "cold", messages[:1], temperature=0.5)


def ask(url: str, session: str, messages: list[Any], **more: Any) -> Any:
    body = {"model": "policy", "messages": messages, "max_tokens": 12, **more}
    reply = httpx.post(f"{url}/s/{session}/v1/chat/completions", json=body, timeout=60)
    return reply.raise_for_status().json()["choices"][0]["message"]


def verified(bridle: Bridle, store: str, session: str, engine: str) -> tuple[int, dict[str, Any]]:
    done = bridle("verify", session, "--store", store, "--engine", engine, "--json")
    (found,) = json.loads(done.output)
    return done.exit_code, found


@pytest.mark.usefixtures("recorded_with")
def test_the_engine_that_sampled_passes_and_its_control_shows_that_ids_count(
    bridle: Bridle, store: str, policy: Path
) -> None:
    with EmbeddedEngine(policy) as engine:
        code, found = verified(bridle, store, "plain", engine.base_url)
        assert (code, found["verdict"], found["tokens"]) == (0, "ok", 24)
        assert found["gap"] < 1e-4 < 1e-3 < found["control"]
        assert found["texts"] > 10
        assert found["other_texts"] == []
        shown = bridle("verify", "plain", "--store", store, "--engine", engine.base_url)
        assert shown.exit_code == 0, shown.output
        code, found = verified(bridle, store, "cold", engine.base_url)
        assert (code, found["verdict"]) == (1, "nothing to compare"), "drawn at temperature 0.5"


@pytest.mark.usefixtures("recorded_with")
def test_one_changed_weight_matrix_is_found(
    bridle: Bridle, store: str, policy: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(policy, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = next(name for name in sorted(weights) if "layers.0" in name and "up_proj" in name)
    weights[name] = weights[name] * 1.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with EmbeddedEngine(other) as engine:
        code, found = verified(bridle, store, "plain", engine.base_url)
    assert (code, found["verdict"]) == (1, "other weights")
    assert found["other_texts"] == []


@pytest.mark.usefixtures("recorded_with")
def test_a_tokenizer_with_two_ids_exchanged_is_found(
    bridle: Bridle, store: str, policy: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(policy, tmp_path / "other")
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    pairs = [(name, number) for name, number in vocabulary.items() if len(name) == 1]
    for (one, first), (two, second) in zip(pairs[::2], pairs[1::2], strict=False):
        vocabulary[one], vocabulary[two] = second, first
    file.write_text(json.dumps(tokenizer))
    with EmbeddedEngine(other) as engine:
        code, found = verified(bridle, store, "plain", engine.base_url)
        shown = bridle("verify", "plain", "--store", store, "--engine", engine.base_url)
    assert (code, found["verdict"]) == (1, "another tokenizer")
    assert found["gap"] < 1e-4, "the ids and the weights are the same"
    assert " was " in shown.output


@pytest.mark.usefixtures("recorded_with")
def test_an_engine_whose_numbers_do_not_depend_on_ids_proves_nothing(
    bridle: Bridle, store: str, policy: Path
) -> None:
    with ScriptedEngine(policy, lambda _: ScriptedReply("four")) as engine:
        done = bridle("verify", "plain", "--store", store, "--engine", engine.base_url)
    assert done.exit_code == 1
    assert "no verdict" in done.output, done.output


@pytest.mark.usefixtures("recorded_with")
def test_an_engine_that_is_not_there_is_named(bridle: Bridle, store: str) -> None:
    done = bridle("verify", "last", "--store", store, "--engine", "http://127.0.0.1:9")
    assert done.exit_code != 0
    assert "is the engine running?" in done.output
