"""The matrix of harnesses and families: its report, and going on from it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bridle.bench import matrix as bench
from bridle.bench.harness_cases import HarnessCase
from bridle.bench.matrix import Cell, Matrix, bench_matrix, markdown
from bridle.harnesses.adapters import Command
from bridle.harnesses.install import find_python_harness
from bridle.recipes.models.tiny_tokenizer import train_tokenizer

WHOLE = Cell(1, 0, 0, 7, changed=("system_messages_merged",))
REFUSED = Cell(0, 0, 0, 1, problems=("the harness failed",), refused="No tools here.")
BROKEN = replace(WHOLE, rows=7, breaks=6, unexplained=1)


@pytest.fixture
def matrix() -> Matrix:
    return Matrix({"qwen3": {"pi": WHOLE, "codex": BROKEN}, "gemma3": {"pi": REFUSED}})


def test_a_cell_is_one_row_without_an_unexplained_break_or_refused(matrix: Matrix) -> None:
    assert matrix.failures() == [
        "codex on qwen3: 7 rows of 1 session",
        "codex on qwen3: 1 unexplained breaks",
    ]
    assert replace(REFUSED, refused="").failures == ["the harness failed", "0 rows of 1 session"]


def test_the_page_has_a_line_per_family_and_names_what_was_changed(matrix: Matrix) -> None:
    page = markdown(matrix)
    assert "| family | codex | pi |" in page
    assert "| qwen3 | 7, 6 <sup>1</sup> | 1, 0 <sup>1</sup> |" in page
    assert "| gemma3 | – | refused |" in page
    assert "1. `system_messages_merged`" in page
    assert "Refused (1): *No tools here.*" in page
    assert "- codex on qwen3: 7 rows of 1 session" in page
    assert "--only codex --only pi --family qwen3 --family gemma3 --table" in page


def test_a_run_goes_on_from_the_cells_that_do_not_fail(matrix: Matrix, tmp_path: Path) -> None:
    matrix.write(tmp_path / "matrix.json")
    known = Matrix.read(tmp_path / "matrix.json")
    assert known.cells == {"qwen3": {"pi": WHOLE}, "gemma3": {"pi": REFUSED}}
    assert [file.name for file in tmp_path.iterdir()] == ["matrix.json"]
    again = asyncio.run(bench_matrix(["qwen3", "gemma3"], [], known=known))
    assert again.cells == known.cells


def test_a_harness_that_cannot_start_fails_its_own_cell_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_tokenizer(tmp_path / "model", ["A tokenizer without a family."])
    monkeypatch.setattr(bench, "model_directory", lambda _family: tmp_path / "model")

    def uninstalled() -> Command:
        return Command((find_python_harness("no-such", "python"),))

    cases = [
        HarnessCase("uninstalled", "chat", uninstalled),
        HarnessCase("lost", "chat", lambda: Command(("/no/such/program",))),
        HarnessCase("idle", "chat", lambda: Command(("true",))),
    ]
    row = asyncio.run(bench_matrix(["qwen3"], cases)).cells["qwen3"]

    assert row["uninstalled"].failures == [
        "did not start: no-such is not installed; run harnesses/python/install"
    ]
    assert row["lost"].failures == [
        "did not start: cannot start /no/such/program: [Errno 2] No such file or directory"
    ]
    assert row["idle"].failures[-1] == "0 rows of 1 session"
    assert not row["idle"].not_started


def test_the_page_names_a_harness_that_did_not_start(matrix: Matrix, tmp_path: Path) -> None:
    matrix.cells["gemma3"]["codex"] = Cell(0, 0, 0, 0, not_started="codex is not installed")
    page = markdown(matrix)
    assert "| gemma3 | not started | refused |" in page
    assert "- codex on gemma3: did not start: codex is not installed" in page
    matrix.write(tmp_path / "matrix.json")
    assert "codex" not in Matrix.read(tmp_path / "matrix.json").cells["gemma3"]
