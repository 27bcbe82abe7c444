"""``bridle bench rivals``: arms on the same sessions, and a check of every arm's own record."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bridle.bench.rivals import aiperf_load
from bridle.bench.rivals import measure as measuring
from bridle.bench.rivals.aiperf_load import times_in
from bridle.bench.rivals.arms import ARMS, Arm, Place
from bridle.bench.rivals.engine import number_in, sampled_ids
from bridle.bench.rivals.measure import Plan, Workload, measure
from bridle.bench.rivals.page import page, summary
from bridle.bench.rivals.sessions import SessionLoad
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


def _report(engine: str, kept: float, client: str = "own") -> dict[str, Any]:
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
        "client": client,
        "client_version": "0.1",
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
    led = page(_report("scripted", 0.7, "aiperf"), again)
    assert led.startswith(page(_report("scripted", 0.8)))
    assert led.index("## Led by AIPerf\n") < led.index("### load") < led.index("| bridle | 70.0%")
    assert led.index("| bridle | 70.0%") < led.index("## Through vLLM\n")
    assert led.endswith(both[len(first) :])


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


def test_aiperfs_report_is_taken_as_times():
    spread = {"p50": 2.0, "p99": 9.0}
    report = {
        "request_count": {"avg": 18.0},
        "benchmark_duration": {"avg": 0.5},
        "time_to_first_token": spread,
        "inter_chunk_latency": {"p50": 5.0, "p99": 6.0},
        "http_req_data_sent": {"p50": 0.5, "p99": 0.7},
        "total_output_tokens": {"avg": 234.0},
        "error_summary": [{"error_details": {"message": "no"}, "count": 2}],
    }
    found = times_in(report)
    assert (found.calls, found.failed, found.seconds, found.sampled) == (18, 2, 0.5, 234)
    assert (found.first_ms, found.between_ms) == ((2.0, 9.0), (5.0, 6.0))
    assert "no" in found.error
    nothing = times_in({"error_summary": report["error_summary"]})
    assert (nothing.calls, nothing.failed) == (0, 2)


def test_aiperf_leads_the_sessions_of_a_load(tmp_path, monkeypatch):
    """A program in its place writes what it was asked for; AIPerf itself has an environment."""
    program = tmp_path / "aiperf"
    program.write_text(FAKE_AIPERF.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(aiperf_load, "PROGRAM", program)
    url = "http://127.0.0.1:1/s/{session}/v1"
    load = SessionLoad(url, "policy", "one", 2, 1, 3, opening=300, growth=50, fields={"n": 1})
    assert aiperf_load.lead(load, tmp_path, tmp_path / "run", None).calls == 6
    asked = json.loads((tmp_path / "run" / "asked.json").read_text())
    assert asked[asked.index("--custom-endpoint") + 1] == "/s/one/v1/chat/completions"
    assert asked[asked.index("--url") + 1] == "http://127.0.0.1:1"
    assert asked[asked.index("--concurrency") + 1] == "2"
    sessions = (tmp_path / "run" / "sessions.jsonl").read_text().splitlines()
    turns = [json.loads(line)["turns"] for line in sessions]
    assert [[len(turn["text"]) // 50 for turn in each] for each in turns] == [[6, 1, 1]] * 2
    with pytest.raises(aiperf_load.AiperfFailed, match="ended with 3"):
        aiperf_load.lead(replace(load, model="broken"), tmp_path, tmp_path / "again", None)


FAKE_AIPERF = """#!{python}
import json, sys
from pathlib import Path
asked = sys.argv[1:]
if "broken" in asked:
    sys.exit(3)
out = Path(asked[asked.index("--output-artifact-dir") + 1])
(out / "asked.json").write_text(json.dumps(asked))
spread = dict(p50=1.0, p99=2.0)
names = ("time_to_first_token", "inter_chunk_latency", "http_req_data_sent")
report = dict(request_count=dict(avg=6.0), benchmark_duration=dict(avg=1.0), error_summary=[])
report |= dict.fromkeys(names, spread) | dict(total_output_tokens=dict(avg=9.0))
(out / "profile_export_aiperf.json").write_text(json.dumps(report))
"""


def test_each_rival_has_what_installs_it() -> None:
    for arm in ARMS:
        if (own := arm.own_environment) is not None:
            pinned = Path(own).parent.joinpath("requirements.txt").read_text()
            assert f"{arm.distribution}==" in pinned
