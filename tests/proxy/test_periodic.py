"""Test that a repeated action goes on until it is closed, whatever becomes of one time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bridle.proxy.periodic import Periodic


async def test_a_time_that_raises_is_logged_and_not_the_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = 0
    thrice = asyncio.Event()

    async def action() -> None:
        nonlocal times
        times += 1
        if times == 1:
            raise ValueError("this once")
        if times == 3:
            thrice.set()

    periodic = Periodic("counting", 0.005, action)
    periodic.start()
    await asyncio.wait_for(thrice.wait(), 10)
    await periodic.close()

    (line,) = caplog.records
    assert (line.message, line.__dict__["task"]) == ("periodic_failed", "counting")
    assert "this once" in caplog.text


async def test_closing_ends_the_time_that_is_under_way() -> None:
    begun, ended = asyncio.Event(), []

    async def action() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    periodic = Periodic("sleeping", 0.005, action)
    periodic.start()
    await asyncio.wait_for(begun.wait(), 10)
    await periodic.close()
    assert ended == [True]


async def test_what_was_never_started_can_be_closed() -> None:
    async def action() -> Any:
        raise AssertionError("never started")

    await Periodic("idle", 0.005, action).close()
