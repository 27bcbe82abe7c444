"""The gate where new calls wait during a weight update."""

from __future__ import annotations

import asyncio
import math

from bridle.proxy.engines.pool import Policy, PolicyGate


async def test_a_waiting_call_stays_outside_when_the_gate_closes_again_at_once() -> None:
    gate = PolicyGate()
    gate.set(Policy(), paused=True)
    waiting = asyncio.create_task(gate.passed())
    await asyncio.sleep(0)
    gate.set(Policy(), paused=False)
    gate.set(Policy(), paused=True)
    assert await gate.drained(1.0)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert gate.waiting == 1
    gate.set(Policy(), paused=False)
    await waiting
    assert gate.waiting == 0


async def test_draining_waits_for_the_running_calls() -> None:
    gate = PolicyGate()
    gate.running += 2
    draining = asyncio.create_task(gate.drained(10.0))
    await asyncio.sleep(0)
    gate.running -= 1
    await asyncio.sleep(0.1)
    assert not draining.done()
    gate.running -= 1
    assert await draining
    gate.running += 1
    assert not await gate.drained(0.05)


async def test_no_call_passes_by_what_was_read_too_long_ago() -> None:
    gate = PolicyGate()
    read: list[int] = []

    async def reading() -> None:
        read.append(gate.waiting)
        gate.set(Policy(4), paused=len(read) < 3)
        gate.fresh_until = math.inf if len(read) > 1 else 0.0

    gate.read, gate.fresh_until = reading, 0.0
    passing = asyncio.create_task(gate.passed())
    await asyncio.sleep(0.05)
    assert (read, passing.done()) == ([1], False), "the row says that calls wait"
    gate.set(Policy(4), paused=False)
    gate.fresh_until = 0.0
    await asyncio.sleep(0.05)
    assert (read, passing.done()) == ([1, 1], False), "it still does"
    gate.set(Policy(5), paused=False)
    await passing
    assert gate.waiting == 0
