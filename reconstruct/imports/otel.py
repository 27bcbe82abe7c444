"""OpenTelemetry spans of the GenAI conventions, with messages in their attributes.

A file has OTLP's JSON (``resourceSpans``), whole or in lines, or a span in each line as the SDK's
``to_json`` writes it. Spans with ``gen_ai.output.messages`` are calls of a model. Those of one
conversation (``gen_ai.conversation.id``, else the trace) are a session, in the order of time. A
call continues the latest one whose messages and reply are the beginning of its own messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from bridle.reconstruct.imports.turns import (
    ImportedSession,
    ImportedTurn,
    NotReadable,
    json_lines,
    seconds,
)
from bridle.store.records import Message, ToolCall

_OUTPUT: Final = "gen_ai.output.messages"
_VALUES: Final = ("stringValue", "boolValue", "doubleValue", "bytesValue")


@dataclass(frozen=True, slots=True)
class _Span:
    session: str
    at: float
    attributes: Mapping[str, Any]


def read_otel(path: Path) -> Iterator[ImportedSession]:
    """Yield a session for each conversation."""
    sessions: dict[str, list[_Span]] = {}
    for span in _spans(path):
        if _OUTPUT in span.attributes:
            sessions.setdefault(span.session, []).append(span)
    if not sessions:
        raise NotReadable(
            f"{path}: no span has `{_OUTPUT}`; instrumentations write it when content is captured"
        )
    for name, spans in sessions.items():
        ordered = sorted(spans, key=lambda span: span.at)
        attributes = ordered[0].attributes
        yield ImportedSession(
            f"otel-{name}",
            _turns(ordered),
            harness=attributes.get("gen_ai.agent.name"),
            tools=tuple(_parsed(attributes.get("gen_ai.tool.definitions")) or ()),
        )


def _spans(path: Path) -> Iterator[_Span]:
    try:
        whole = [orjson.loads(path.read_bytes())]
    except orjson.JSONDecodeError:
        whole = list(json_lines(path))
    for entry in whole:
        if "resourceSpans" not in entry:
            context = entry.get("context") or {}
            at = seconds(entry.get("start_time")) or 0.0
            attributes = entry.get("attributes") or {}
            yield _Span(_session(attributes, context.get("trace_id")), at, attributes)
            continue
        scopes = (scope for one in entry["resourceSpans"] for scope in one["scopeSpans"])
        for span in (span for scope in scopes for span in scope["spans"]):
            attributes = {one["key"]: _value(one["value"]) for one in span.get("attributes", ())}
            at = int(span.get("startTimeUnixNano", 0)) / 1e9
            yield _Span(_session(attributes, span.get("traceId")), at, attributes)


def _session(attributes: Mapping[str, Any], trace: Any) -> str:
    return str(attributes.get("gen_ai.conversation.id") or trace or "")


def _value(value: Mapping[str, Any]) -> Any:
    """Return the value of an attribute of OTLP's JSON."""
    if "intValue" in value:
        return int(value["intValue"])
    if "arrayValue" in value:
        return [_value(one) for one in value["arrayValue"].get("values", ())]
    if "kvlistValue" in value:
        return {one["key"]: _value(one["value"]) for one in value["kvlistValue"].get("values", ())}
    return next((value[name] for name in _VALUES if name in value), None)


def _turns(spans: Sequence[_Span]) -> tuple[ImportedTurn, ...]:
    turns: list[ImportedTurn] = []
    wholes: list[tuple[Message, ...]] = []
    for span in spans:
        get = span.attributes.get
        asked = (
            *_messages([{"role": "system", "parts": _parsed(get("gen_ai.system_instructions"))}]),
            *_messages(_parsed(get("gen_ai.input.messages"))),
        )
        outputs = _parsed(get(_OUTPUT)) or [{}]
        reply = next(iter(_messages(outputs[:1])), Message("assistant"))
        known = (n for n in reversed(range(len(wholes))) if asked[: len(wholes[n])] == wholes[n])
        before = next(known, None)
        brought = asked if before is None else asked[len(wholes[before]) :]
        wholes.append((*asked, reply))
        turns.append(
            ImportedTurn(
                brought,
                reply,
                before,
                get("gen_ai.response.model") or get("gen_ai.request.model"),
                span.at,
                outputs[0].get("finish_reason"),
                {
                    "prompt_tokens": get("gen_ai.usage.input_tokens"),
                    "completion_tokens": get("gen_ai.usage.output_tokens"),
                },
            )
        )
    return tuple(turns)


def _parsed(value: Any) -> Any:
    return orjson.loads(value) if isinstance(value, str) else value


def _messages(messages: Any) -> Iterator[Message]:
    for message in messages or ():
        parts = message.get("parts") or ()
        for part in parts:
            if part["type"] == "tool_call_response":
                answer = part.get("response", part.get("result"))
                text = answer if isinstance(answer, str) else orjson.dumps(answer).decode()
                yield Message("tool", text, tool_call_id=part.get("id"))
        text = "".join(part["content"] for part in parts if part["type"] == "text")
        thought = "".join(part["content"] for part in parts if part["type"] == "reasoning")
        calls = tuple(_call(part) for part in parts if part["type"] == "tool_call")
        role = message["role"]
        if role != "tool" and (text or thought or calls):
            yield Message(
                "system" if role == "developer" else role, text or None, thought or None, calls
            )


def _call(part: Mapping[str, Any]) -> ToolCall:
    arguments = part.get("arguments")
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()
    return ToolCall(part.get("id") or "", part["name"], text)
