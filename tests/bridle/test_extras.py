"""What belongs to an extra is missed with the name of that extra, in our own distribution."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from click.testing import Result

import bridle as face

ROOT = Path(__file__).parents[2]


def without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``bridle ARGUMENTS`` where ``module`` is not installed."""
    script = (
        f"import sys; sys.modules[{module!r}] = None; from bridle.cli.program import app; app()"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )


def test_parquet_names_its_extra_and_text_needs_none(
    store: str, recorded: str, tmp_path: Path
) -> None:
    refused = without("pyarrow", "export", str(tmp_path / "x.parquet"), "--store", store)
    assert refused.returncode == 1
    assert "pip install 'bridle-rl[parquet]'" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = without("pyarrow", "export", str(tmp_path / "x.jsonl"), "--store", store)
    assert done.returncode == 0, done.stderr
    assert without("pyarrow", "audit", "--store", store).returncode == 0


def test_the_embedded_engine_names_its_extra(model_dir: Path) -> None:
    refused = without("torch", "engine", "embedded", "--model", str(model_dir))
    assert refused.returncode == 1
    assert "pip install 'bridle-rl[train]'" in refused.stderr


def test_every_extra_that_a_message_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set()
    for room in ("src/bridle", "proxy", "reconstruct", "trainer", "engine", "store"):
        for file in (ROOT / room).rglob("*.py"):
            if "node_modules" not in file.parts and ".venv" not in str(file):
                named |= set(re.findall(r"bridle-rl\[(\w+)\]", file.read_text(encoding="utf-8")))
    assert named
    assert named <= set(project["optional-dependencies"])


def test_the_package_knows_its_version() -> None:
    assert face.__version__ == metadata.version("bridle-rl")


def test_a_conflict_is_told_in_words(
    bridle: Callable[..., Result], proxy_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    httpx.post(f"{proxy_url}/bridle/v1/sessions", json={"name": "lamps"}).raise_for_status()
    refused = bridle("run", "--proxy", proxy_url, "--name", "lamps", "--", "true")
    assert refused.exit_code == 1
    assert refused.stderr.endswith("session 'lamps' exists already\n")
    assert "{" not in refused.stderr
