"""Test that a missing part is reported with the name of its extra, in our own distribution."""

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
from bridle.extras import install_command

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
    assert install_command("parquet") in refused.stderr
    assert "Traceback" not in refused.stderr
    done = without("pyarrow", "export", str(tmp_path / "x.jsonl"), "--store", store)
    assert done.returncode == 0, done.stderr
    assert without("pyarrow", "audit", "--store", store).returncode == 0


def test_the_embedded_engine_names_its_extra(model_dir: Path) -> None:
    refused = without("torch", "engine", "embedded", "--model", str(model_dir))
    assert refused.returncode == 1
    assert install_command("train") in refused.stderr


def test_postgresql_names_its_extra() -> None:
    refused = without("psycopg", "sessions", "--store", "postgresql://localhost/x")
    assert refused.returncode == 1
    assert install_command("postgres") in refused.stderr


def origin(monkeypatch: pytest.MonkeyPatch, direct_url: str | None) -> None:
    """Plays an installation whose ``direct_url.json`` is ``direct_url``."""

    class Distribution:
        def read_text(self, name: str) -> str | None:
            return direct_url if name == "direct_url.json" else None

    monkeypatch.setattr("bridle.extras.metadata.distribution", lambda name: Distribution())


@pytest.mark.parametrize(
    ("direct_url", "command"),
    [
        (None, "pip install 'bridle-rl[train]'"),
        (
            '{"url": "https://x/bridle_rl.whl", "archive_info": {}}',
            "pip install 'bridle-rl[train]'",
        ),
        (
            '{"url": "file:///home/me/my%20bridle", "dir_info": {"editable": true}}',
            "pip install -e '/home/me/my bridle[train]'",
        ),
        ('{"url": "file:///src/bridle", "dir_info": {}}', "pip install '/src/bridle[train]'"),
    ],
)
def test_an_extra_comes_from_where_the_package_came_from(
    monkeypatch: pytest.MonkeyPatch, direct_url: str | None, command: str
) -> None:
    origin(monkeypatch, direct_url)
    assert install_command("train") == command


ASKED = re.compile(
    r"(?:needs_extra\(|install_command\(|require\(\s*\"[\w.]+\",|missing_extra\(\s*\"[^\"]*\",)"
    r"\s*[\"'](\w+)[\"']"
)
"""The ways in which a source asks for an extra by its name."""


def texts() -> dict[str, str]:
    """Every source and document that Git knows, by path."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    endings = {".py", ".md", ".ipynb", ".toml", ".yml", ".yaml", ".sh", ""}
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8", errors="replace")
        for path in paths
        if path.suffix in endings and path.is_file()
    }


def test_no_text_installs_a_package_of_another_project() -> None:
    stranger = re.compile(r"pip3? install[^\n`#;]*[ '\"]bridle(?=[\s'\"\[`])")
    assert stranger.search("pip install 'bridle[postgres]'")
    assert stranger.search("pip install bridle\n")
    assert not stranger.search("pip install bridle-rl 'bridle-rl[train]'")
    here = "tests/bridle/test_extras.py"
    wrong = [name for name, text in texts().items() if name != here and stranger.search(text)]
    assert wrong == []


def test_every_extra_that_a_text_names_exists_and_one_place_spells_its_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set()
    for name, text in texts().items():
        if name.startswith("tests/"):
            continue
        spelled = re.findall(r"bridle-rl\[(\w+)\]", text)
        assert not (name.endswith(".py") and spelled), f"{name} spells {spelled}"
        named |= set(spelled) | set(ASKED.findall(text))
    assert {"train", "parquet", "postgres", "redact", "otel", "ray", "bench"} <= named
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
