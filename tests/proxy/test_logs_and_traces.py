"""Log lines carry ids and no secrets; calls become spans by the GenAI conventions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from bridle.engine.scripted import Refuse

pytestmark = pytest.mark.usefixtures("warm_start")

CHAT = "/v1/chat/completions"
ADMIN = "admin-key-4711-never-to-be-seen"
ENGINE = "engine-key-0815-never-to-be-seen"
SECRET = "the prompt says swordfish"

http = httpx.Client(timeout=60, trust_env=False)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_json_lines_have_session_and_call_ids_and_never_a_secret(
    stage: Any, tmp_path: Path, workers: str
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "bridle", "proxy", "--engine", stage.engine.base_url]
    command += ["--store", str(tmp_path / "bridle.db"), "--port", "0", "--json"]
    command += ["--workers", workers, "--set", "log_format=json", "--set", "log_level=info"]
    keys = {"BRIDLE_ADMIN_KEY": ADMIN, "BRIDLE_UPSTREAM_API_KEY": ENGINE}
    environment = {**os.environ, **keys}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment
        )
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    admin = {"authorization": f"Bearer {ADMIN}"}
    made = http.post(f"{url}/bridle/v1/sessions", json={}, headers=admin).json()
    body = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}
    key = {"authorization": f"Bearer {made['key']}"}
    assert http.post(url + CHAT, json=body, headers=key).status_code == 200
    assert http.post(url + CHAT + f"?key={made['key']}", content=b"{", headers=key).is_error
    assert http.post(url + CHAT, json=body, headers={"x-api-key": "brk_guess"}).status_code == 401
    stage.play = lambda _: Refuse(500, "broken")
    assert http.post(url + CHAT, json=body, headers=key).status_code == 500
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    text = log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    ended = [line for line in lines if line["event"] == "call_ended"]
    assert [line["status"] for line in ended] == ["complete", "failed"]
    assert {line["session"] for line in ended} == {made["id"]}
    assert all(line["call"].startswith("call_") and line["ms"] >= 0 for line in ended)
    assert ended[0]["sampled_tokens"] == 6
    refused = [line["kind"] for line in lines if line["event"] == "request_refused"]
    assert sorted(refused) == ["authentication", "invalid_request"]
    for secret in (ADMIN, ENGINE, made["key"], "brk_guess", "swordfish"):
        assert secret not in text


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """The process's tracer provider; OpenTelemetry takes only one."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_calls_are_spans_of_the_clients_trace(
    stage: Any, start_proxy: Any, exporter: InMemorySpanExporter, ask: Any
) -> None:
    bench = start_proxy(stage.engine.base_url, tracing=True)
    parent = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    http.post(f"{bench.url}/s/lamp{CHAT}", json=ask | {"temperature": 0.5}, headers=parent)
    stage.play = lambda _: Refuse(500, "broken")
    body = {"model": "claude", "max_tokens": 9, "messages": [{"role": "user", "content": SECRET}]}
    http.post(f"{bench.url}/s/lamp/v1/messages", json=body)
    http.get(f"{bench.url}/healthz")  # observers are told before a later request is looked at
    well, failed = exporter.get_finished_spans()
    call, other = bench.calls()
    assert well.name == "chat gpt-x"
    assert f"{well.context.trace_id:032x}" == TRACE  # type: ignore[union-attr]
    attributes = dict(well.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.conversation.id"] == call.session_id
    assert attributes["gen_ai.response.id"] == call.id
    assert attributes["gen_ai.response.model"] == "tiny-policy"
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.usage.output_tokens"] == call.sampled_tokens == 6
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["bridle.policy_version"] == 0
    assert well.end_time is not None
    assert well.start_time is not None
    assert abs(well.start_time / 1e9 - call.started_at) < 1e-3
    assert [event.name for event in well.events] == ["gen_ai.first_token"]
    assert failed.status.status_code is StatusCode.ERROR
    assert dict(failed.attributes or {})["error.type"] == "upstream_error" == other.reason
    assert SECRET not in failed.to_json()


def test_without_being_asked_no_span_is_made(
    bench: Any, exporter: InMemorySpanExporter, ask: Any
) -> None:
    exporter.clear()
    http.post(bench.url + CHAT, json=ask)
    http.get(f"{bench.url}/healthz")
    assert exporter.get_finished_spans() == ()
