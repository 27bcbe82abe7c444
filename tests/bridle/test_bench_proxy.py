"""``bridle bench proxy``: the keys that programs read, and figures checked against the store."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bridle.bench.load import Load, percentiles, request_body
from bridle.bench.upstream import CHUNKS, SMALL, stream_events, whole
from bridle.cli.program import app
from support.processes import until

pytestmark = pytest.mark.loop


@pytest.mark.sampled(0)
def test_the_report_has_the_promised_keys_and_nothing_is_lost() -> None:
    given = ["--runs", "1", "--seconds", "0.2", "--case", "c1", "--case", "s64", "--json"]
    found = CliRunner().invoke(app, ["bench", "proxy", *given])
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["calls_per_s"]["c1"] > 0
    assert report["floor_ratio"]["c1"] > 0
    assert report["added_ms"]["c1"].keys() == {"p50", "p99"}
    assert report["stream"]["s64"].keys() == {
        "added_ttft_p50_ms",
        "added_ttft_p99_ms",
        "whole_ratio",
        "lost",
    }
    assert report["stream"]["s64"]["lost"] == report["lost"] == 0
    assert report["rss_mb"] > 0


def children(parent: int) -> list[Path]:
    """The ``/proc`` directories of a process's children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(stat.parent)
    return found


@pytest.mark.sampled(0)
def test_told_to_end_it_leaves_no_process_behind() -> None:
    command = [sys.executable, "-m", "bridle", "bench", "proxy", "--case", "c1", "--seconds", "60"]
    bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    until(lambda: len(children(bench.pid)) >= 4, 60)
    started = children(bench.pid)
    bench.terminate()
    bench.wait(60)
    assert not [each for each in started if each.exists()]


@pytest.mark.sampled(0)
def test_several_processes_are_compared_with_one_on_the_same_store() -> None:
    given = ["--workers", "2", "--runs", "1", "--seconds", "0.2", "--json"]
    found = CliRunner().invoke(app, ["bench", "proxy", *given])
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["calls_per_s"].keys() == {"c16.1", "c16.2", "c64.1", "c64.2"}
    assert all(each > 0 for each in report["ratio"].values())
    assert all(0 < each <= report["cores"] for each in report["busy_cores"].values())
    assert report["failed"] == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--case", "c7"], "there are c1, c16"),
        (["--store", "x.db"], "--store is for --workers"),
        (["--workers", "2", "--case", "c1"], "leave --case out"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: list[str], told: str) -> None:
    found = CliRunner().invoke(app, ["bench", "proxy", *given])
    assert found.exit_code != 0
    assert told in found.output


def test_the_loads_have_the_sizes_that_the_bars_are_about() -> None:
    assert 7_000 < len(whole(SMALL, 256, 72)) < 9_000
    for size in (1024, 223 * 1024):
        load = Load("http://x/v1", SMALL, 1, size, "n")
        assert len(request_body(load, "n-0-0", 0)) == pytest.approx(size, rel=0.15)
    assert sum(event.count(b'"token_ids":[') for event in stream_events()) == CHUNKS


def test_percentiles_are_in_milliseconds_by_nearest_rank() -> None:
    assert percentiles([number / 1000 for number in range(100)]) == (50.0, 99.0)
