"""The state that each proxy process reports of itself, and the sums over all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from bridle.proxy.engines.policy_gate import PolicyGate
from bridle.proxy.engines.pool import EngineState
from bridle.store.records import DEFAULT_POLICY


class ProcessReport(msgspec.Struct, frozen=True):
    """The state of one process at one moment."""

    pid: int
    workers: str | None
    """The common name of the workers of one port, as in the settings."""
    running: int
    waiting: int
    engines: list[EngineState]
    retiring: list[str]
    """Base URLs of engines that were removed and still run calls."""
    metrics: str


class GateState(msgspec.Struct, frozen=True):
    """The state of the gates over all processes."""

    version: int
    """The default policy's version; ``model`` is its model."""
    model: str | None
    paused: bool
    running: int
    """Number of running calls over all policies; ``waiting`` likewise."""
    waiting: int
    policies: dict[str, int]
    """The versions of the further policies, by name."""


def gate_state(gates: Mapping[str, PolicyGate], others: Sequence[ProcessReport]) -> GateState:
    """Return the state of this process's gates, given by the policies' names, with the running and
    waiting calls of all processes."""
    default = gates[DEFAULT_POLICY]
    counts = [(gate.running, gate.waiting) for gate in gates.values()]
    counts += [(report.running, report.waiting) for report in others]
    return GateState(
        version=default.policy.version,
        model=default.policy.model,
        paused=default.paused,
        running=sum(running for running, _ in counts),
        waiting=sum(waiting for _, waiting in counts),
        policies={name: gate.version for name, gate in gates.items() if name != DEFAULT_POLICY},
    )


def engine_states(own: Sequence[EngineState], others: Sequence[ProcessReport]) -> list[EngineState]:
    """Return this process's engines, with the calls and failures of all processes."""
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
