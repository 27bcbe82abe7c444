"""100,000 calls at steady load: the proxy's memory stays flat and no descriptor is left open."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from bridle.bench.load import SESSION_CALLS, Load, Measured
from bridle.bench.proxy import proxy_process, recording_proxy, rss_mb, upstream_process
from bridle.bench.upstream import SMALL
from bridle.store.reading.queries import Reader

CALLS = 100_000
PORTIONS = 20
WORKERS = 16
NEW_DESCRIPTORS = 8
"""A connection or two may open late: SQLite's readers, the engine's pool."""


def asked(url: str, portion: int) -> Measured:
    load = Load(
        url=f"{url}/s/{{session}}/v1",
        model=SMALL,
        concurrency=WORKERS,
        request_bytes=1024,
        name=f"soak-{portion}",
        calls=CALLS // PORTIONS // WORKERS,
    )
    done = subprocess.run(
        [sys.executable, "-m", "bridle.bench.load"],
        input=json.dumps(asdict(load)).encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    return Measured(**json.loads(done.stdout))


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[tuple[int, str]]:
    with ExitStack() as stack:
        engine = stack.enter_context(upstream_process(None))
        command = recording_proxy(tmp_path / "soak.db")
        process, url = stack.enter_context(proxy_process(engine, command, None))
        yield process.pid, url


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_memory_and_descriptors_stay_flat_over_100_000_calls(
    proxy: tuple[int, str], tmp_path: Path
) -> None:
    pid, url = proxy
    memory, open_files, answered = [], [], 0
    for portion in range(PORTIONS):
        measured = asked(url, portion)
        assert measured.failed == 0
        answered += measured.calls
        memory.append(rss_mb(pid))
        open_files.append(descriptors(pid))
    print(f"resident MiB {memory}, descriptors {open_files}")
    tenth = PORTIONS // 10
    second, last = memory[tenth : 2 * tenth], memory[-tenth:]
    assert statistics.mean(last) <= 1.1 * statistics.mean(second)
    assert open_files[-1] <= open_files[tenth] + NEW_DESCRIPTORS
    with Reader(str(tmp_path / "soak.db")) as reader:
        sessions = list(reader.sessions())
        assert len(sessions) >= answered // SESSION_CALLS
        assert sum(sum(reader.call_counts(one.id).values()) for one in sessions) == answered
