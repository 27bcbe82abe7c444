"""``bridle ablate`` on a recorded session."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from matplotlib.figure import Figure

Bridle = Callable[..., Result]


def test_ablate_compares_the_builders_and_plots_them(
    bridle: Bridle, store: str, recorded: str, tmp_path: Path
) -> None:
    plot = tmp_path / "plots" / "ablation.of-two"
    result = bridle("ablate", "--store", store, "--plot", plot, "--parameters", "7e9", "--json")
    data = json.loads(result.stdout)
    rows = data["builders"]
    assert set(rows) == {"tree", "merged", "per_call"}
    assert rows["tree"]["samples"] == 1
    assert rows["per_call"]["samples"] == 2
    assert rows["per_call"]["tokens_repeated"] > 0 == rows["merged"]["tokens_repeated"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert data["plot"] == str(plot)


def test_ablate_prints_a_table_with_compute(bridle: Bridle, store: str, recorded: str) -> None:
    result = bridle("ablate", "--store", store)
    assert result.exit_code == 0
    assert "1 session, 2 calls" in result.stdout
    assert "1.00×" in result.stdout


def test_there_is_no_table_and_no_plot_of_nothing(
    bridle: Bridle, store: str, tmp_path: Path
) -> None:
    plot = tmp_path / "x.png"
    result = bridle("ablate", "--store", store, "--plot", plot)
    assert result.exit_code == 1
    assert (result.stdout, result.stderr) == ("", "bridle: the store holds no session yet\n")
    assert not plot.exists()


def test_the_plot_that_was_written_is_named(
    bridle: Bridle, store: str, recorded: str, tmp_path: Path
) -> None:
    plot = tmp_path / "x.png"
    result = bridle("ablate", "--store", store, "--plot", plot)
    assert result.stdout.splitlines()[-1].startswith(f"{plot}: ")
    assert plot.exists()


def test_the_plot_counts_breaks_in_whole_numbers_from_0_on(
    bridle: Bridle,
    recorded: str,
    store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    assert bridle("ablate", "--store", store, "--plot", tmp_path / "x.png").exit_code == 0
    _, breaks = drawn[0].axes
    low, high = breaks.get_xlim()
    assert low == 0 < high
    assert all(float(tick).is_integer() for tick in breaks.get_xticks())
