"""The gate where new calls wait during a weight update."""

from __future__ import annotations

import asyncio

from bridle.proxy.engines.policy_gate import PolicyGate


async def test_a_waiting_call_stays_outside_when_the_gate_closes_again_at_once() -> None:
    gate = PolicyGate()
    gate.pause()
    waiting = asyncio.create_task(gate.passed())
    await asyncio.sleep(0)
    gate.resume()
    gate.pause()
    assert await gate.drained(1.0)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert gate.waiting == 1
    gate.resume()
    await waiting
    assert gate.waiting == 0


async def test_draining_waits_for_the_running_calls() -> None:
    gate = PolicyGate()
    gate.running += 2
    draining = asyncio.create_task(gate.drained(10.0))
    await asyncio.sleep(0)
    for still_running in (True, False):
        assert gate.draining
        gate.running -= 1
        gate.left()
        for _ in range(3):
            await asyncio.sleep(0)
        assert draining.done() is not still_running
    assert await draining
    assert not gate.draining
