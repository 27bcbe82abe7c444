"""The gate that new calls wait at during a weight update."""

from __future__ import annotations

import asyncio

from bridle.proxy.engines.policy_gate import PolicyGate


async def test_who_waits_stays_outside_when_the_gate_closes_again_at_once() -> None:
    gate = PolicyGate()
    gate.pause()
    waiting = asyncio.create_task(gate.enter())
    await asyncio.sleep(0)
    gate.resume()
    gate.pause()
    assert await gate.drained(1.0)
    for _ in range(3):
        await asyncio.sleep(0)
    assert (gate.running, gate.waiting) == (0, 1)
    gate.resume()
    await waiting
    assert (gate.running, gate.waiting) == (1, 0)
