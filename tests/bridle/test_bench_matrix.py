"""The matrix of harnesses and families: its report, and going on from it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bridle.bench.matrix import Cell, Matrix, bench_matrix, markdown

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
