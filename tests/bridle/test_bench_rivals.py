"""``bridle bench rivals``: arms on the same sessions, and a check of every arm's own record."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bridle.bench.rivals import measure as measuring
from bridle.bench.rivals.arms import ARMS, Arm, Place
from bridle.bench.rivals.engine import number_in, sampled_ids
from bridle.bench.rivals.measure import Plan, Workload, measure
from bridle.bench.rivals.page import page, summary
from bridle.cli.program import app

pytestmark = pytest.mark.loop

TINY = Workload("tiny", concurrency=2, sessions=1, turns=3, opening=64, growth=16, reply=8)


def _forged(place: Place) -> Iterator[tuple[str, list[int]]]:
    """A record with one call whose ids are another's."""
    yield "Reply 1:", sampled_ids(2, TINY.reply)


@pytest.mark.sampled(0)
def test_bridle_has_every_call_and_a_broken_arm_does_not_end_the_bench() -> None:
    broken = Arm("broken", "no proxy", lambda _: [sys.executable, "-c", "raise SystemExit('no')"])
    absent = Arm("absent", "not installed", lambda _: [], distribution="nothing")
    forged = Arm("forged", "the engine with a record that is wrong", recorded=_forged)
    named = {arm.name: arm for arm in ARMS}
    arms = [*(named[name] for name in ("direct", "bridle", "bridle-external")), forged]
    report = measure(Plan("scripted", [TINY], [*arms, broken, absent], rounds=2, gap_ms=0.0))

    found = report["workloads"]["tiny"]
    assert list(found["arms"]) == ["direct", "bridle", "bridle-external", "forged"]
    assert all(arm["failed"] == 0 and arm["calls"] == 14 for arm in found["arms"].values())
    assert found["arms"]["bridle"]["recorded_exactly"] == 1.0
    assert found["arms"]["bridle"]["rss_mb"] > 0
    assert found["arms"]["bridle-external"]["recorded_exactly"] == 0.0
    assert found["arms"]["forged"]["recorded_exactly"] == 0.0
    assert found["arms"]["direct"]["throughput_kept"] == [1.0, 1.0, 1.0]
    assert found["unstarted"]["broken"].endswith("no\n")
    assert report["missing"] == {"absent": "benchmarks/rivals/install absent"}
    assert "| broken | did not start |" in page(report)
    assert "absent is not installed: benchmarks/rivals/install absent" in summary(report)


def _report(engine: str, kept: float) -> dict[str, Any]:
    figures = {
        "throughput_kept": [kept] * 3,
        "first_ms": [250.0, 300.0],
        "first_ratio": 0.15,
        "added_first_ms": [2.0, 9.0],
        "between_ms": [5.0, 6.0],
        "rss_mb": 90.0,
        "keeps_record": True,
        "recorded_exactly": 1.0,
        "failed": 0,
    }
    load = {"input_tokens": [100_000, 110_000], "concurrency": 8, "turns": 12, "reply": 32}
    return {
        "engine": engine,
        "model": None,
        "gap_ms": 5.0,
        "rounds": 3,
        "date": "today",
        "machine": {"cores": 2, "processor": "x"},
        "python": "3",
        "missing": {},
        "arms": {"bridle": {"what": "exact", "version": "1"}},
        "workloads": {"load": {**load, "arms": {"bridle": figures}, "unstarted": {}}},
    }


def test_a_report_replaces_the_part_of_its_own_engine_alone() -> None:
    first = page(_report("scripted", 0.9))
    both = page(_report("vllm", 2.24), first)
    assert both.startswith(first)
    assert "## Through vLLM\n" in both
    assert "| bridle | 2.24 (2.24 to 2.24) | 250 / 300 | 0.15 |" in both
    again = page(_report("scripted", 0.8), both)
    assert "| bridle | 90.0%" not in again
    assert "| bridle | 80.0%" in again
    assert again.endswith(both[len(first) :])
    assert page(_report("vllm", 2.5), again).count("## Through vLLM") == 1


def test_only_the_engines_own_ids_count_as_exact() -> None:
    ids = [*sampled_ids(7, 7), 2]
    assert number_in("data: Reply 7: four") == 7
    assert number_in("no reply") is None
    assert measuring._is_exact(7, ids, 8)
    assert not measuring._is_exact(8, ids, 8)
    assert not measuring._is_exact(7, ids[:-1], 8)
    assert not measuring._is_exact(None, ids, 8)


def test_unknown_arms_and_loads_are_refused() -> None:
    for option in ("--arm", "--workload"):
        refused = CliRunner().invoke(app, ["bench", "rivals", option, "other"])
        assert refused.exit_code == 2, json.dumps(refused.output)
        assert "there is no other; there are" in refused.output


def test_each_rival_has_what_installs_it() -> None:
    for arm in ARMS:
        if (own := arm.own_environment) is not None:
            pinned = Path(own).parent.joinpath("requirements.txt").read_text()
            assert f"{arm.distribution}==" in pinned
