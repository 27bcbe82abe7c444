"""Alerts and dashboard name what a proxy really exposes, and every expression is PromQL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml

from bridle.proxy.engines.circuit import CircuitState
from bridle.proxy.engines.pool import EngineState, PolicyGate
from bridle.proxy.recording.metrics import Metrics
from bridle.store.records import DEFAULT_POLICY, CallStatus

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def expressions() -> Iterator[str]:
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Names of all series of a proxy, with their labels."""
    metrics = Metrics({DEFAULT_POLICY: PolicyGate()})
    engine = EngineState("a", "http://a", CircuitState.CLOSED, 0, False, True, 0, 0, 0, 0)
    metrics.watch(lambda: [engine])
    metrics.events.labels("note")
    metrics.refused.labels("chat", "auth")
    metrics.calls.labels("chat", "complete")
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for suffix in SUFFIXES[family.type]:
            labels = {label for sample in family.samples for label in sample.labels}
            found[family.name + suffix] = labels
    return found


@pytest.mark.parametrize("expression", list(expressions()))
def test_it_is_promql_over_series_and_labels_that_there_are(
    exposed: dict[str, set[str]], expression: str
) -> None:
    promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    named = set(re.findall(r"\b(?:bridle_\w+)", expression))
    assert named <= exposed.keys()
    assert named or expression == 'up{job="bridle"} == 0'
    labels = set().union(*(exposed[name] for name in named))
    for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {label.strip() for label in grouped.split(",")} <= labels
    for status in re.findall(r'status!?="(\w+)"', expression):
        assert status in set(CallStatus)
    for state in re.findall(r'state="(\w+)"', expression):
        assert state in set(CircuitState)


def test_every_alert_says_what_to_do() -> None:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_a_series_that_is_not_there_is_noticed(exposed: dict[str, set[str]]) -> None:
    with pytest.raises(AssertionError):
        test_it_is_promql_over_series_and_labels_that_there_are(exposed, "bridle_call_total > 0")
