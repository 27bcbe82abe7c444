"""Prometheus counters and histograms of one proxy."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from bridle.proxy.engines.circuit import CircuitState
from bridle.proxy.engines.pool import EngineState, PolicyGate
from bridle.store.call import CallEnded
from bridle.store.records import DEFAULT_POLICY, BreakReason, CallStatus, Note

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds of the histograms' buckets."""


class Metrics:
    """The metrics of one proxy, in a registry of their own.

    One process can therefore have several.
    """

    def __init__(self, gates: Mapping[str, PolicyGate], *, labelled: bool = False) -> None:
        """Create the metrics.

        ``gates`` has one gate for each policy, by the policy's name. ``labelled`` gives each sample
        the process id as its label ``worker``, for one of several processes behind a port.
        """
        self._labelled = labelled
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "bridle_calls", "Recorded calls", ["dialect", "status"], registry=self.registry
        )
        self._endings: dict[tuple[str, CallStatus], Counter] = {}
        """The children of ``calls``: a look-up by labels costs more than the increment."""
        self.refused = Counter(
            "bridle_refused_requests",
            "Requests refused before they became calls",
            ["dialect", "kind"],
            registry=self.registry,
        )
        self.events = Counter(
            "bridle_events",
            "Named events that weaken or change a record",
            ["name"],
            registry=self.registry,
        )
        self.breaks = Counter(
            "bridle_breaks",
            "Calls that continue another in meaning but not in tokens",
            ["reason"],
            registry=self.registry,
        )
        for reason in BreakReason:
            self.breaks.labels(reason.value)
        self.unrecorded = Counter(
            "bridle_unrecorded_calls",
            "Calls that the store did not take",
            registry=self.registry,
        )
        self.sessions_read = Counter(
            "bridle_sessions_read",
            "Sessions whose calls were read from the store: after a start, from another process, "
            "or because they did not fit into memory",
            registry=self.registry,
        )
        self.sampled_tokens = Counter(
            "bridle_sampled_tokens", "Sampled tokens recorded", registry=self.registry
        )
        self.first_token_s = DurationHistogram(
            "bridle_first_token_seconds", "Request admitted to first token", self.registry
        )
        self.call_s = DurationHistogram(
            "bridle_call_seconds", "Request admitted to record committed", self.registry
        )
        running = Gauge("bridle_running_calls", "Calls at the engine", registry=self.registry)
        running.set_function(lambda: sum(gate.running for gate in gates.values()))
        waiting = Gauge("bridle_waiting_calls", "Calls at the gate", registry=self.registry)
        waiting.set_function(lambda: sum(gate.waiting for gate in gates.values()))
        version = Gauge(
            "bridle_policy_version", "Version of the default policy", registry=self.registry
        )
        version.set_function(lambda: gates[DEFAULT_POLICY].version)

    def watch(self, engines: Callable[[], Iterable[EngineState]]) -> None:
        """Add the metrics of these engines."""
        self.registry.register(_Engines(engines))

    def count_notes(self, notes: Iterable[Note]) -> None:
        for note in notes:
            self.events.labels(note.name).inc()

    def count_call(
        self, dialect: str, started_at: float, ended: CallEnded, committed_at: float
    ) -> None:
        """Count a call that was committed at ``committed_at``."""
        ending = (dialect, ended.status)
        calls = self._endings.get(ending)
        if calls is None:
            calls = self._endings[ending] = self.calls.labels(dialect, ended.status.value)
        calls.inc()
        self.call_s.observe(committed_at - started_at)
        if ended.first_token_at is not None:
            self.first_token_s.observe(ended.first_token_at - started_at)
        for choice in ended.choices:
            self.sampled_tokens.inc(len(choice.token_ids))
        if ended.break_reason is not None:
            self.breaks.labels(ended.break_reason.value).inc()
        if ended.notes:
            self.count_notes(ended.notes)

    def exposition(self) -> bytes:
        return generate_latest(_Labelled(self.registry) if self._labelled else self.registry)


class DurationHistogram(Collector):
    """A histogram of seconds for one thread.

    The library's own takes several locks for each observation.
    """

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._counts = [0] * (len(SECONDS) + 1)
        """Number of observations in each bucket; the last bucket is above all bounds."""
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        bounds = [*(str(float(bound)) for bound in SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric([], buckets, self._sum)
        yield family


class _Engines(Collector):
    """Metrics of the engines, read at each exposition."""

    def __init__(self, states: Callable[[], Iterable[EngineState]]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        circuit = GaugeMetricFamily(
            "bridle_engine_circuit", "1 for the state that it is in", labels=["engine", "state"]
        )
        usable = GaugeMetricFamily(
            "bridle_engine_usable", "Circuit and served weights admit calls", labels=["engine"]
        )
        running = GaugeMetricFamily(
            "bridle_engine_running_calls", "Calls at this engine", labels=["engine"]
        )
        version = GaugeMetricFamily(
            "bridle_engine_policy_version", "Policy version it serves", labels=["engine"]
        )
        retries = CounterMetricFamily(
            "bridle_engine_retries", "Calls sent again after it failed them", labels=["engine"]
        )
        ejections = CounterMetricFamily(
            "bridle_engine_ejections", "Times its circuit opened", labels=["engine"]
        )
        changes = CounterMetricFamily(
            "bridle_engine_changes",
            "Times it was found with other weights than were published to it",
            labels=["engine"],
        )
        otherwise = GaugeMetricFamily(
            "bridle_engine_renders_otherwise",
            "1: its prompts are not what the proxy renders, so its calls are not continued exactly",
            labels=["engine"],
        )
        for engine in self._states():
            for state in CircuitState:
                circuit.add_metric([engine.name, state], float(engine.circuit is state))
            usable.add_metric([engine.name], float(engine.usable))
            running.add_metric([engine.name], engine.running)
            version.add_metric([engine.name], engine.policy_version)
            retries.add_metric([engine.name], engine.retries)
            ejections.add_metric([engine.name], engine.ejections)
            changes.add_metric([engine.name], engine.changes)
            otherwise.add_metric([engine.name], float(bool(engine.rendering_difference)))
        yield from (circuit, usable, running, version, retries, ejections, changes, otherwise)


class _Labelled(Collector):
    """The metrics of a registry with this process's label."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        own = {"worker": str(os.getpid())}
        for family in self._registry.collect():
            family.samples = [one._replace(labels={**one.labels, **own}) for one in family.samples]
            yield family
