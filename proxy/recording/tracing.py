"""OpenTelemetry spans of recorded calls, by the GenAI semantic conventions. Needs ``[otel]``.

A span is created after its call's commit, with the times of the record. Prompts and replies are in
the store only. A client's ``traceparent`` makes the span part of the client's trace. A tracer
provider that is already set exports the spans; otherwise they are sent by OTLP over HTTP, as the
standard ``OTEL_*`` variables configure it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bridle.proxy.dialects.dialect import Dialect
from bridle.store.call import CallBegun, CallEnded
from bridle.store.records import CallKind, CallStatus

_REQUEST: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}
_WELL: Final = frozenset({CallStatus.COMPLETE, CallStatus.QUARANTINED})


class Tracing:
    """An observer that turns recorded calls into spans until it is closed."""

    def __init__(self, dialects: Mapping[str, Dialect]) -> None:
        """Start tracing calls of the ``dialects``, by their names."""
        self._dialects = dialects
        provider = trace.get_tracer_provider()
        self._own: TracerProvider | None = None
        if not isinstance(provider, TracerProvider):
            provider = self._own = TracerProvider(
                resource=Resource.create({"service.name": "bridle"})
            )
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = provider.get_tracer("bridle.proxy")
        self._context = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Send the spans that wait for export."""
        if self._own is not None:
            self._own.shutdown()

    def observe(self, begun: CallBegun, ended: CallEnded, engine: str | None) -> None:
        """Create the span of a committed call."""
        dialect = self._dialects[begun.dialect]
        span = self._tracer.start_span(
            f"{dialect.operation} {begun.model_requested}",
            context=self._context.extract(begun.headers),
            kind=SpanKind.CLIENT,
            attributes=_attributes(dialect, begun, ended),
            start_time=_ns(begun.started_at),
        )
        if ended.first_token_at is not None:
            span.add_event("gen_ai.first_token", timestamp=_ns(ended.first_token_at))
        for note in ended.notes:
            span.add_event(f"bridle.{note.name}", timestamp=_ns(ended.ended_at))
        if ended.status not in _WELL:
            span.set_attribute("error.type", ended.reason or ended.status.value)
            span.set_status(Status(StatusCode.ERROR, ended.reason))
        span.end(_ns(ended.ended_at))


def _attributes(dialect: Dialect, begun: CallBegun, ended: CallEnded) -> dict[str, Any]:
    versions = [run for choice in ended.choices for run in choice.versions]
    found: dict[str, Any] = {
        "gen_ai.operation.name": dialect.operation,
        "gen_ai.provider.name": dialect.provider.trace_name or dialect.provider.name,
        "gen_ai.conversation.id": ended.session_id,
        "gen_ai.request.model": begun.model_requested,
        "gen_ai.response.id": ended.id,
        "gen_ai.response.model": ended.model_served,
        "gen_ai.usage.input_tokens": ended.usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": ended.usage.get("completion_tokens"),
        "gen_ai.agent.name": ended.role,
        "bridle.dialect": begun.dialect,
        "bridle.call.status": ended.status.value,
        "bridle.call.kind": None if ended.kind is CallKind.UNKNOWN else ended.kind.value,
        "bridle.call.parent": begun.parent_call_id,
        "bridle.policy_version": versions[-1].version if versions else None,
    }
    for name, attribute in _REQUEST.items():
        found[f"gen_ai.request.{attribute}"] = ended.sampling.get(name)
    reasons = [choice.finish_reason for choice in ended.choices if choice.finish_reason]
    if reasons:
        found["gen_ai.response.finish_reasons"] = reasons
    return {name: value for name, value in found.items() if value is not None}


def _ns(seconds: float) -> int:
    return int(seconds * 1_000_000_000)
