"""A newcomer's path: record, look, write a starter, train it and look, as the page prints it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import free_port
from support.typed import WAIT, console_blocks

PAGE = Path(__file__).parents[2] / "docs" / "first-training.md"


@pytest.mark.loop
@pytest.mark.timeout(480)
def test_a_newcomer_records_looks_trains_and_looks(tmp_path: Path) -> None:
    ports = {"8000": str(free_port()), "8484": str(free_port())}
    typed = re.sub("8000|8484", lambda port: ports[port[0]], PAGE.read_text(encoding="utf-8"))
    begin, serve, record, train, look = console_blocks(typed)
    engine, proxy = serve.strip().splitlines()
    proxy = f"{proxy.removesuffix('&')} --port {ports['8484']} &"
    pages = free_port()
    script = "\n".join(
        [
            "set -e",
            "trap 'kill $(jobs -p); wait' EXIT",
            begin,
            *(engine, WAIT.format(f"http://127.0.0.1:{ports['8000']}/health")),
            *(proxy, WAIT.format(f"http://127.0.0.1:{ports['8484']}/readyz")),
            *(record, train),
            f"{look.strip()} --port {pages} &",
            WAIT.format(f"http://127.0.0.1:{pages}/runs"),
            f"curl -sf http://127.0.0.1:{pages}/runs",
        ]
    )
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "BRIDLE_PROXY": f"http://127.0.0.1:{ports['8484']}",
            "BRIDLE_HOME": str(tmp_path / "home"),
        },
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Which number comes after 41?" in done.stdout
    report = json.loads((tmp_path / "first/runs/first/report.json").read_text())
    assert report["steps"] == 12
    assert report["run"]["name"] == "first"
    assert report["run"]["config"]["policy"]["model"] == "tiny"
    first, *_, last = report["reward_by_step"]
    assert last > first + 0.05, "it learned"
    assert ">first</a>" in done.stdout, "the run has the name of its folder"
