"""``--fresh`` deletes a run, and nothing that is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bridle.cli.program import app
from bridle.recipes.demo.state import DemoState, start_afresh


@pytest.mark.parametrize("command", ["demo", "reproduce"])
def test_files_that_are_no_run_are_left_where_they_are(tmp_path: Path, command: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    refused = CliRunner().invoke(app, [command, "--fresh", "--out", str(tmp_path)])
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"bridle: {tmp_path}: no run to start afresh")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_is_deleted_whole_and_an_empty_folder_will_do(tmp_path: Path) -> None:
    start_afresh(tmp_path / "none")
    start_afresh(tmp_path)
    DemoState(tmp_path).save()
    (tmp_path / "policy").mkdir()
    start_afresh(tmp_path)
    assert not tmp_path.exists()


def test_a_run_of_one_policy_is_not_continued_with_another(tmp_path: Path) -> None:
    begun = DemoState(tmp_path)
    begun.require_policy("tiny")
    begun.save()
    refused = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert refused.exit_code == 2
    assert "--policy tiny goes on with it, --fresh deletes it" in refused.stderr
