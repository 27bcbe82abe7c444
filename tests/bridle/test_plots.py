"""The plot of a training run, as its figure is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridle.run.report import plot_training, pyplot


@pytest.fixture
def figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    measured = [
        {"step": step, "reward": reward, "reward_low": reward - 0.1, "reward_high": reward + 0.1}
        for step, reward in ((0, 0.3), (4, 0.8))
    ]
    report = {
        "run": {"id": "run_x", "name": "first"},
        "reward_by_step": [0.3, 0.4, 0.6, 0.7],
        "evaluations": measured,
    }
    plot_training(report, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    return kept[0]


def test_a_plot_has_a_title_a_whole_axis_and_a_legend_beside_its_lines(figure: Any) -> None:
    (axes,) = figure.axes
    assert axes.get_title() == "first: held-out reward 0.30 → 0.80"
    assert axes.get_ylim() == (0.0, 1.03)
    figure.canvas.draw()
    (legend,) = figure.legends
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
