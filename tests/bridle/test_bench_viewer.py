"""The viewer's bench reads every page of a store that it makes, and keeps it when asked to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result


def test_every_page_and_list_action_is_timed(bridle: Callable[..., Result], tmp_path: Path) -> None:
    store = tmp_path / "kept.db"
    asked = ("--sessions", 8, "--repeats", 1, "--store", store, "--json")
    done = bridle("bench", "viewer", *asked)
    report = json.loads(done.stdout)
    assert {"sessions", "session", "run", "groups", "audit"} <= set(report["pages"])
    assert {"text filter", "findings of a run"} <= set(report["actions"])
    slow = [
        name
        for kind, bar in report["bars_ms"].items()
        for name, times in report[kind].items()
        if times["median_ms"] > bar
    ]
    assert done.exit_code == bool(slow)
    assert all(times["median_ms"] > 0 for times in report["pages"].values())
    assert store.exists()
