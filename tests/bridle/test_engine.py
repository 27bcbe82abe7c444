"""``bridle engine`` says in a line why it cannot serve; a scripted engine plays a user's file."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import Result

from bridle.recipes.models.tiny import TinyShape, make_policy

pytestmark = pytest.mark.usefixtures("warm_start")

Bridle = Callable[..., Result]


@pytest.mark.parametrize("kind", ["empty", "broken"])
def test_a_folder_without_a_tokenizer_is_named(bridle: Bridle, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if kind == "broken":
        (folder / "tokenizer.json").write_text("nonsense")
    done = bridle("engine", "embedded", "--model", folder, "--port", 0)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"bridle: no tokenizer in {folder}: ")
    assert done.stderr.count("\n") == 1


def test_a_folder_without_weights_is_named(bridle: Bridle, model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    done = bridle("engine", "embedded", "--model", folder, "--port", 0)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"bridle: no loadable causal LM in {folder}: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("config", [{"hidden_size": "32"}, {"num_attention_heads": 0}, None])
def test_a_configuration_that_no_model_can_have_is_told_in_a_line(
    bridle: Bridle, model_dir: Path, tmp_path: Path, config: dict[str, object] | None
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    make_policy(folder, TinyShape(hidden=32, layers=1, heads=1, kv_heads=1), vocab_size=600)
    path = folder / "config.json"
    path.write_text(json.dumps(config and json.loads(path.read_text()) | config))
    for command in (
        ("engine", "embedded", "--model", folder, "--port", 0),
        ("sft", "--policy", folder, "--out", tmp_path / "tuned", "--data", tmp_path / "data.jsonl"),
    ):
        (tmp_path / "data.jsonl").write_text('{"prompt": "two", "completion": "three"}')
        done = bridle(*command)
        assert done.exit_code == 1
        assert done.stderr.startswith(f"bridle: no loadable causal LM in {folder}: ")
        assert done.stderr.count("\n") == 1


def test_a_taken_port_is_named(bridle: Bridle, model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = bridle("engine", "embedded", "--model", model_dir, "--port", port)
    assert done.exit_code == 1
    said = f"bridle: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert done.stderr == f"{said}; choose another --port\n"


def test_a_scripted_engine_serves_this_machine_only(bridle: Bridle) -> None:
    refused = bridle("engine", "scripted", "--host", "0.0.0.0")  # noqa: S104
    assert refused.exit_code == 2
    assert "serves this machine only, not 0.0.0.0" in refused.stderr


def test_a_scripted_engine_replies_as_the_users_function_does(
    model_dir: Path, tmp_path: Path
) -> None:
    script = tmp_path / "parrot.py"
    script.write_text("def reply(request):\n    return request.messages[-1]['content'].upper()\n")
    argv = [sys.executable, "-m", "bridle", "engine", "scripted", "--port", "0", "--json"]
    argv += ["--model", str(model_dir), "--script", f"{script}:reply"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as engine:
        try:
            assert engine.stdout is not None
            url = json.loads(engine.stdout.readline())["url"]
            asked = {"model": "scripted", "messages": [{"role": "user", "content": "two lamps"}]}
            reply = httpx.post(f"{url}/v1/chat/completions", json=asked, trust_env=False).json()
        finally:
            engine.terminate()
    assert reply["choices"][0]["message"]["content"] == "TWO LAMPS"
