"""AIPerf's load in four dialects, with conversations of several turns: it counts no error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONVERSATIONS, TURNS = 3, 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["messages", "chat", "responses", "completions"])
def test_load(kind: str, url: str, tmp_path: Path) -> None:
    turns = 1 if kind == "completions" else TURNS
    options = {
        "--endpoint-type": kind,
        "--url": url,
        "--model": "policy",
        "--tokenizer": os.environ["BRIDLE_REFEREES_INPUTS"],
        "--conversation-num": CONVERSATIONS,
        "--conversation-turn-mean": turns,
        "--conversation-turn-stddev": 0,
        "--isl": 16,
        "--osl": 200,
        "--concurrency": 2,
        "--ui": "none",
        "--workers-max": 1,
        "--artifact-dir": tmp_path,
    }
    flags = ["--streaming"]
    flags += [str(part) for option in options.items() for part in option]
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", *flags]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:]
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    summary = json.loads(report.read_text())
    assert not summary.get("error_summary"), summary["error_summary"]
    assert summary["request_count"]["avg"] == CONVERSATIONS * turns
