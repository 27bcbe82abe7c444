"""The viewer's bench reads every page of a store that it makes, and keeps it when asked to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from bridle.bench.viewer import over_bars


@pytest.mark.loop
@pytest.mark.sampled(0)
def test_every_page_and_list_action_is_timed(bridle: Callable[..., Result], tmp_path: Path) -> None:
    store = tmp_path / "kept.db"
    asked = ("--sessions", 8, "--repeats", 1, "--store", store, "--json")
    shortly = ("--record-seconds", 0.5, "--record-runs", 1)
    done = bridle("bench", "viewer", *asked, *shortly)
    report = json.loads(done.stdout)
    assert {"sessions", "session", "run", "groups", "audit"} <= set(report["pages"])
    assert {"text filter", "findings of a run"} <= set(report["actions"])
    for compared in ("recording", "neighbour"):
        assert set(report[compared]["added_ms"]) == {"p50", "p99"}
        assert set(report[compared]["added_own_pages_ms"]) == {"p50", "p99"}
    assert done.exit_code == bool(over_bars(report))
    assert all(times["median_ms"] > 0 for times in report["pages"].values())
    assert store.exists()


def test_what_is_over_its_bar_is_named() -> None:
    report = {
        "pages": {"sessions": {"median_ms": 201.0}, "runs": {"median_ms": 3.0}},
        "actions": {"text filter": {"median_ms": 299.0}},
        "bars_ms": {"pages": 200.0, "actions": 300.0},
        "recording": {
            "added_ms": {"p50": 0.5, "p99": 5.0},
            "added_own_pages_ms": {"p50": 1.5, "p99": 3.0},
            "bars_ms": {"p50": 1.0, "p99": 4.0},
        },
        "neighbour": {
            "added_ms": {"p50": 0.5, "p99": 3.5},
            "added_own_pages_ms": {"p50": -0.1, "p99": 3.0},
            "bars_ms": {"p50": 1.0, "p99": 3.0},
        },
    }
    recording = ["recording p99", "recording, own pages p50"]
    assert over_bars(report) == ["sessions", *recording, "neighbour p99"]
