"""What each proxy process reports of itself, and the sums over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bridle.proxy.engines.policy_gate import PolicyGate
from bridle.proxy.engines.pool import EngineState


class ProcessReport(msgspec.Struct, frozen=True):
    """One process at one moment."""

    pid: int
    workers: str | None
    """Names the workers of one port, as in the settings."""
    running: int
    waiting: int
    engines: list[EngineState]
    retiring: list[str]
    """Base URLs of engines that were removed and still run calls."""
    metrics: str


class GateState(msgspec.Struct, frozen=True):
    """The gate over all processes."""

    version: int
    model: str | None
    paused: bool
    running: int
    waiting: int


def gate_state(gate: PolicyGate, others: Sequence[ProcessReport]) -> GateState:
    """This process's gate, with the running and waiting calls of all processes."""
    return GateState(
        version=gate.policy.version,
        model=gate.policy.model,
        paused=gate.paused,
        running=gate.running + sum(report.running for report in others),
        waiting=gate.waiting + sum(report.waiting for report in others),
    )


def engine_states(own: Sequence[EngineState], others: Sequence[ProcessReport]) -> list[EngineState]:
    """This process's engines, with the calls and failures of all processes."""
    states = list(own)
    for report in others:
        by_url = {engine.url: engine for engine in report.engines}
        states = [_sum(state, by_url.get(state.url)) for state in states]
    return states


def _sum(state: EngineState, other: EngineState | None) -> EngineState:
    if other is None:
        return state
    return msgspec.structs.replace(
        state,
        changed=state.changed or other.changed,
        usable=state.usable and other.usable,
        running=state.running + other.running,
        retries=state.retries + other.retries,
        ejections=state.ejections + other.ejections,
        changes=state.changes + other.changes,
        rendering_difference=state.rendering_difference or other.rendering_difference,
    )
