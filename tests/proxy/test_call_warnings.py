"""Quarantined calls are in the log: the first of each cause, and how many followed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedReply
from bridle.proxy.recording.call_warnings import CallWarnings
from bridle.store.call import CallBegun, CallEnded
from bridle.store.records import IDS_MISSING, CallStatus, Note

CHAT = "/v1/chat/completions"
IMPOSSIBLE = 0.5
"""A logprob that no token can have."""


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[logging.LogRecord]]:
    """The warnings of the proxy so far."""
    caplog.set_level(logging.WARNING, "bridle.proxy")
    return lambda: [line for line in caplog.records if line.levelno >= logging.WARNING]


def test_an_engine_whose_every_reply_is_quarantined_is_in_the_log(
    bench: Any, stage: Any, ask: Any, warnings: Callable[[], list[Any]]
) -> None:
    stage.play = lambda _: ScriptedReply("The answer is four.", logprob=IMPOSSIBLE)
    for _ in range(5):
        assert httpx.post(bench.url + CHAT, json=ask).status_code == 200
    metrics = httpx.get(bench.url + "/metrics").text
    assert 'bridle_calls_total{dialect="chat",status="quarantined"} 5.0' in metrics
    (first,) = warnings()
    assert first.getMessage() == "call_quarantined"
    assert first.call == bench.calls()[0].id
    assert first.engine == stage.engine.base_url.removeprefix("http://")
    assert first.reason.startswith("logprobs_positive")
    bench.server.stop()
    last = warnings()[-1]
    assert last.getMessage() == "calls_quarantined"
    assert (last.calls, last.since_start) == (4, 5)


def test_a_client_that_samples_at_temperature_0_is_in_the_log_once(
    bench: Any, ask: Any, warnings: Callable[[], list[Any]]
) -> None:
    for _ in range(3):
        httpx.post(bench.url + CHAT, json={**ask, "temperature": 0}).raise_for_status()
    (line,) = warnings()
    assert line.getMessage() == "temperature_zero"
    assert line.call == bench.calls()[0].id
    assert "--sampling policy" in line.meaning


def ended(calls: Any, *, reason: str = "", notes: tuple[Note, ...] = ()) -> CallEnded:
    status = CallStatus.QUARANTINED if reason else CallStatus.COMPLETE
    return CallEnded(
        id="call_x",
        session_id="ses_x",
        status=status,
        ended_at=1.0,
        reason=reason or None,
        notes=notes,
    )


def test_thousands_of_calls_make_a_line_for_each_cause(
    calls: Any, warnings: Callable[[], list[Any]]
) -> None:
    seen = CallWarnings()
    begun: CallBegun = calls.begun("ses_x")

    def come(number: int) -> None:
        for turn in range(number):
            engine = f"engine-{turn % 2}"
            reason = ("usage_mismatch: 3 of 4", f"logprobs_mismatch: {turn} ids")[turn % 4 // 2]
            seen.observe(begun, ended(calls, reason=reason), engine)
            seen.observe(begun, ended(calls), engine)

    come(1353)
    causes = {(line.engine, line.reason.partition(":")[0]) for line in warnings()}
    assert len(warnings()) == len(causes) == 4
    asyncio.run(seen.summarise())
    assert len(warnings()) == 8
    assert sum(line.calls for line in warnings()[4:]) == 1353 - 4
    asyncio.run(seen.summarise())
    assert len(warnings()) == 8, "nothing came since"
    come(4)
    asyncio.run(seen.summarise())
    assert [line.calls for line in warnings()[8:]] == [1, 1, 1, 1]
    assert sum(line.since_start for line in warnings()[8:]) == 1357


def test_missing_ids_are_warned_of_once(calls: Any, warnings: Callable[[], list[Any]]) -> None:
    seen = CallWarnings()
    for _ in range(3):
        without = ended(calls, notes=(Note(IDS_MISSING),))
        seen.observe(calls.begun("ses_x"), without, None)
    assert [line.getMessage() for line in warnings()] == ["no_token_ids"]
