"""A wall clock that jumps in the midst of a call changes no duration."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedReply
from bridle.store.reading.queries import Reader
from bridle.store.records import RunRecord
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer

JUMP_S = -172_800.0


class Jumping:
    """A wall clock that is set back by two days when it has been read."""

    def __init__(self) -> None:
        self.offset = 0.0
        self._time = time.time

    def __call__(self) -> float:
        return self._time() + self.offset


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Jumping:
    jumping = Jumping()
    monkeypatch.setattr(time, "time", jumping)
    return jumping


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_keeps_its_duration(
    stage: Any, start_proxy: Any, clock: Jumping, stream: bool
) -> None:
    def answer(_: Any) -> ScriptedReply:
        clock.offset = JUMP_S
        return ScriptedReply("four words are here")

    stage.script = answer
    bench = start_proxy(stage.engine.base_url)
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    httpx.post(f"{bench.url}/v1/chat/completions", json=asked, timeout=60).raise_for_status()
    call = bench.call()
    assert call.ended_at is not None
    assert 0 <= call.ended_at - call.started_at < 60
    if call.first_token_at is not None:
        assert call.started_at <= call.first_token_at <= call.ended_at
    sums = httpx.get(f"{bench.url}/metrics").text
    [total] = [line for line in sums.splitlines() if line.startswith("bridle_call_seconds_sum")]
    assert 0 <= float(total.split()[-1]) < 60


def test_an_attempt_keeps_its_duration(tmp_path: Path, clock: Jumping) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    migrate(url)
    with Writer(url) as writer:
        writer.begin_run(RunRecord("run_1", "train", time.time()))
        clock.offset = JUMP_S
        writer.finish_run("run_1", "completed")
    with Reader(url) as reader:
        [attempt] = reader.attempts("run_1")
    assert attempt.ended_at is not None
    assert 0 <= attempt.ended_at - attempt.started_at < 60
