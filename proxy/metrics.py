"""Prometheus counters and histograms of one proxy."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from proxy.policy_gate import PolicyGate
from store.records import BreakReason, CallEnded, Note

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """One registry per proxy, so that several can live in one process."""

    def __init__(self, gate: PolicyGate) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "bridle_calls", "Recorded calls", ["dialect", "status"], registry=self.registry
        )
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
            "bridle_unrecorded_calls", "Replies delivered unrecorded", registry=self.registry
        )
        self.sampled_tokens = Counter(
            "bridle_sampled_tokens", "Sampled tokens recorded", registry=self.registry
        )
        self.first_token_s = Histogram(
            "bridle_first_token_seconds",
            "Request admitted to first token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.call_s = Histogram(
            "bridle_call_seconds",
            "Request admitted to record committed",
            buckets=_SECONDS,
            registry=self.registry,
        )
        running = Gauge("bridle_running_calls", "Calls at the engine", registry=self.registry)
        running.set_function(lambda: gate.running)
        waiting = Gauge("bridle_waiting_calls", "Calls at the gate", registry=self.registry)
        waiting.set_function(lambda: gate.waiting)
        version = Gauge("bridle_policy_version", "Policy version", registry=self.registry)
        version.set_function(lambda: gate.version)

    def count_notes(self, notes: Iterable[Note]) -> None:
        for note in notes:
            self.events.labels(note.name).inc()

    def count_call(self, dialect: str, started_at: float, ended: CallEnded) -> None:
        self.calls.labels(dialect, ended.status.value).inc()
        self.call_s.observe(ended.ended_at - started_at)
        if ended.first_token_at is not None:
            self.first_token_s.observe(ended.first_token_at - started_at)
        for choice in ended.choices:
            self.sampled_tokens.inc(len(choice.token_ids))
        if ended.break_reason is not None:
            self.breaks.labels(ended.break_reason.value).inc()
        self.count_notes(ended.notes)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
