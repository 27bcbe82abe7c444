"""``bridle engine embedded`` says in a line why it cannot serve."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Bridle = Callable[..., Result]


@pytest.mark.parametrize("kind", ["missing", "empty", "broken"])
def test_a_folder_without_a_tokenizer_is_named(bridle: Bridle, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    if kind != "missing":
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


def test_a_taken_port_is_named(bridle: Bridle, model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = bridle("engine", "embedded", "--model", model_dir, "--port", port)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"bridle: cannot listen on 127.0.0.1:{port}: Address already")
    assert done.stderr.count("\n") == 1
