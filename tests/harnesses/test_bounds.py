"""Test that a session above a bound of processes, memory or disk ends alone, by name."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.sandboxes import (
    ForkedProvider,
    Launch,
    ProcessProvider,
    SandboxRequest,
    bounds,
)
from bridle.harnesses.sandboxes.bounds import Bounds, Watch, disk_bytes
from bridle.harnesses.sandboxes.walls import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no walls: {missing()}")

TAKERS = {
    "processes": """
        import os, time
        for _ in range(60):
            if os.fork() == 0:
                time.sleep(60)
        time.sleep(60)
    """,
    "memory": """
        import time
        kept = b"x" * (500 << 20)
        time.sleep(60)
    """,
    "disk, by its output": """
        import sys, time
        for _ in range(120):
            sys.stdout.write("x" * (1 << 20))
        sys.stdout.flush()
        time.sleep(60)
    """,
    "disk": """
        import time
        with open("/tmp/large", "wb") as file:
            for _ in range(120):
                file.write(bytes(1 << 20))
        time.sleep(60)
    """,
}
BOUNDS = Bounds(processes=40, memory_mb=300, disk_mb=100)


@pytest.fixture(params=["process", "forked"])
async def provider(request: pytest.FixtureRequest) -> Any:
    """Each sandbox with walls."""
    made = ProcessProvider() if request.param == "process" else ForkedProvider()
    yield made
    await made.close()


@pytest.fixture
def launched(make_launch: Any, tmp_path: Path) -> Callable[[str], Launch]:
    """Writes a Python script and returns its launch."""

    def write(text: str) -> Launch:
        path = tmp_path / "script" / "agent.py"
        path.parent.mkdir()
        path.write_text(textwrap.dedent(text))
        return make_launch(sys.executable, str(path), shown=(str(path),)).launch

    return write


@pytest.mark.parametrize("bound", TAKERS)
async def test_a_session_above_a_bound_is_ended_by_its_name(
    provider: Any, launched: Any, tmp_path: Path, bound: str
) -> None:
    async with provider.open(SandboxRequest(tmp_path / "place", bounds=BOUNDS)) as sandbox:
        finished = await sandbox.exec(launched(TAKERS[bound]))

    assert finished.exceeded is not None, finished
    assert bound.partition(",")[0] in finished.exceeded
    assert finished.exit_code == 137
    assert finished.seconds < 20


async def test_a_session_below_its_bounds_is_left_alone(
    provider: Any, launched: Any, tmp_path: Path
) -> None:
    launch = launched("import time\ntime.sleep(1.5)\nprint('done')")
    async with provider.open(SandboxRequest(tmp_path / "place", bounds=BOUNDS)) as sandbox:
        finished = await sandbox.exec(launch)

    assert (finished.exit_code, finished.exceeded) == (0, None)


async def test_processes_that_were_found_before_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"walls": [1, 2, 3]}
    monkeypatch.setattr(bounds, "_grouped_processes", lambda: dict(found))
    census = bounds._Census()
    assert await census.members("walls", since=time.monotonic()) == [1, 2, 3]
    found["walls"] = [4]
    assert await census.members("walls", since=0.0) == [1, 2, 3], "it is read once for all"
    assert await census.members("walls", since=time.monotonic()) == [4]


def test_the_sum_of_a_folder_follows_no_link_and_stops_when_it_is_enough(tmp_path: Path) -> None:
    (tmp_path / "here" / "deep").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "here/deep/file", tmp_path / "there/file"):
        path.write_bytes(b"x" * (1 << 20))
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")

    assert 1 << 20 <= disk_bytes([tmp_path / "here"], 1 << 30) < 2 << 20
    assert disk_bytes([tmp_path / "here", tmp_path / "there"], 1 << 10) < 2 << 20


@pytest.mark.parametrize("name", ["processes", "memory_mb", "disk_mb"])
def test_a_bound_is_no_less_than_0(name: str) -> None:
    with pytest.raises(ValueError, match="less than 0"):
        Bounds(**{name: -1})


async def test_processes_outside_of_walls_are_never_measured() -> None:
    watch = Watch(Bounds(processes=1), ())
    watch.begin(os.getpid())
    await asyncio.sleep(0.1)
    assert watch._running is None
    assert watch.exceeded is None
