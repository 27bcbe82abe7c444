"""``bridle top`` shows what is recorded now, with and without a proxy."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from click.testing import Result

from bridle.cli.terminal import out

Bridle = Callable[..., Result]


@pytest.mark.parametrize("width", [80, 120])
def test_one_look_has_rates_engines_and_sessions(
    bridle: Bridle,
    store: str,
    recorded: str,
    proxy_url: str,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    monkeypatch.setattr(out, "width", width)
    shown = bridle("top", "--once", "--store", store, "--proxy", proxy_url).stdout.splitlines()
    assert shown[0].startswith("0.2 calls/s · ")
    assert "0 running · 1 open session" in shown[0]
    assert shown[1].startswith("engine 127.0.0.1:")
    assert shown[1].endswith(": ok, version 0, 0 calls running")
    assert shown[-2].split() == ["session", "outcome", "calls", "took", "task"]
    assert shown[-1].startswith("lamps    open         2  ")
    assert "What is 2 plus 3?" in shown[-1]
    assert max(map(len, shown)) <= width


def test_without_a_proxy_the_store_is_shown(bridle: Bridle, store: str, recorded: str) -> None:
    gone = bridle("top", "--json", "--store", store, "--proxy", "http://127.0.0.1:9")
    found = json.loads(gone.stdout)
    assert (found["calls"], found["engines"], found["open_sessions"]) == (2, [], 1)
    told = bridle("top", "--once", "--store", store, "--proxy", "http://127.0.0.1:9").stdout
    assert "Is `bridle proxy` running?" in told


def test_it_is_live_in_a_terminal_and_ends_with_ctrl_c(store: str, recorded: str) -> None:
    argv = [sys.executable, "-m", "bridle", "top", "--store", store, "--every", "0.1"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(
        [*argv, "--proxy", "http://127.0.0.1:9"], stdin=theirs, stdout=theirs, env=environment
    ) as process:
        os.close(theirs)
        seen, until = b"", time.monotonic() + 60
        while seen.count(b"calls/s") < 3 and time.monotonic() < until:
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # the terminal goes with the program
            while process.poll() is None and time.monotonic() < until:
                if select.select([ours], [], [], 0.2)[0]:
                    os.read(ours, 65536)
    os.close(ours)
    assert seen.count(b"calls/s") >= 3
    assert process.returncode == 0
