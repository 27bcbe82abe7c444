"""The page on model families."""

from __future__ import annotations

from bridle.bench.model_notes import page

FIGURES = {
    "exact": {"rows_per_session": 1.0, "breaks": 0},
    "rendered": {"breaks": 9},
    "outside_differences": 0,
    "tools": "vanish",
    "stand_in": True,
    "parsers": {"tool": None, "reasoning": "qwen3"},
    "reasons": ["Tails are local."],
}


def test_the_page_has_a_row_and_the_notes_of_each_family() -> None:
    written = page({"small": FIGURES, "away": {"not_fetched": "no network"}})
    assert "| small* | 1.00 | 0 | 0 | 9 | vanish | none | qwen3 |" in written
    assert "## small\n\n- Tails are local." in written
    assert "| away | not fetched |" in written
