"""Imports: other programs' conversations become sessions, and come out as they went in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai.types.chat as chat_types
import pytest
from google.protobuf.json_format import MessageToJson
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from pydantic import TypeAdapter

from bridle.diagnosis.findings import findings_of_session
from bridle.reconstruct.audit import audit
from bridle.reconstruct.exports.formats import export
from bridle.reconstruct.exports.selection import Selection
from bridle.reconstruct.imports.formats import IMPORTS, recognised
from bridle.reconstruct.imports.turns import NotReadable
from bridle.reconstruct.imports.writing import ImportReport, record
from bridle.reconstruct.samples.rules import SampleRules
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import Reader
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer

TRANSCRIPTS = Path(__file__).parent / "transcripts"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


class Store:
    def __init__(self, path: Path) -> None:
        self.url = str(path)
        migrate(self.url)

    def take(self, file: Path, form: str | None = None) -> ImportReport:
        form = form or recognised(file)
        with Reader(self.url) as reader, Writer(self.url) as writer:
            return record(IMPORTS.get(form)(file), form, writer, reader)

    def sessions(self) -> list[LoadedSession]:
        with Reader(self.url) as reader:
            return list(LoadedSession.stream(reader, list(reader.sessions())))

    def lines(self, form: str, path: Path) -> list[dict[str, Any]]:
        with Reader(self.url) as reader:
            rules = SampleRules.from_data({"samplers": "any", "media": True})
            export(reader, path, form, Selection(rules=rules))
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "bridle.db")


def conversation(session: LoadedSession) -> list[tuple[str, Any, Any, list[str]]]:
    return [
        (m.role, m.content, m.reasoning, [call.name for call in m.tool_calls])
        for call in session.calls
        for m in (*(call.conversation.tail if call.conversation else ()), *call.replies)
    ]


@pytest.mark.parametrize("form", ["claude-code", "codex"])
def test_a_harness_s_own_transcript_becomes_its_session(store: Store, form: str) -> None:
    report = store.take(TRANSCRIPTS / f"{form}.jsonl")
    assert (len(report.sessions), report.calls) == (1, 2)
    (session,) = store.sessions()
    assert (session.record.harness, session.record.labels) == (form, {"imported": form})
    first, second = session.calls
    assert second.parent_call_id == first.id
    said = conversation(session)
    assert said[0][0] == "system"
    assert ("user", "What is in this folder?", None, []) in said
    tool = "Bash" if form == "claude-code" else "exec_command"
    assert [calls for _, _, _, calls in said if calls] == [[tool]]
    assert next(content for role, content, *_ in said if role == "tool").endswith(
        "note.txt" if form == "claude-code" else "note.txt\n"
    )
    assert "note.txt" in said[-1][1]
    assert "The result is here" in said[-1][2]
    assert all(not call.sampled_tokens for call in session.calls)


def test_an_import_again_adds_nothing(store: Store) -> None:
    store.take(TRANSCRIPTS / "codex.jsonl")
    again = store.take(TRANSCRIPTS / "codex.jsonl")
    assert (again.sessions, dict(again.left_out)) == ([], {"already_there": 1})


def test_an_imported_session_audits_and_has_nothing_to_train(store: Store) -> None:
    store.take(TRANSCRIPTS / "claude-code.jsonl")
    with Reader(store.url) as reader:
        (found,) = audit(reader)
        findings = findings_of_session(reader, found.session_id)
    assert found.violations == ()
    assert (found.conservation.captured, found.conservation.trained) == (0, 0)
    assert findings == [], "nothing can be done about ids that the file does not have"


def called(name: str, arguments: str, **fields: Any) -> dict[str, Any]:
    call = {"id": name, "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **fields}


LINES: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": "q"},
            called("c1", '{"at": 1}', content="wait", reasoning_content="hm"),
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "assistant", "content": "42\nindeed", "reasoning_content": "so"},
        ],
        "tools": TOOLS,
    },
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "not learned", "weight": 0},
            {"role": "user", "content": [{"type": "text", "text": "again"}]},
            {"role": "assistant", "content": "learned"},
        ]
    },
    {"messages": [{"role": "user", "content": "q"}, called("c2", "{}")]},
]


def test_openai_s_lines_come_out_as_they_went_in(store: Store, tmp_path: Path) -> None:
    check = TypeAdapter(list[chat_types.ChatCompletionMessageParam])
    for line in LINES:
        check.validate_python(line["messages"])
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert store.take(file).calls == 4
    assert store.lines("chat", tmp_path / "out.jsonl") == LINES


def told(trajectory: dict[str, Any]) -> dict[str, Any]:
    """A trajectory without the ids and counts that belong to the store."""
    steps = [
        {
            name: value
            for name, value in step.items()
            if name not in ("metrics", "extra", "timestamp")
        }
        for step in trajectory["steps"]
    ]
    return {"steps": steps, "agent": trajectory["agent"], "rewards": trajectory["extra"]["rewards"]}


def test_atif_comes_out_as_it_went_in(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    store.take(file)
    first = store.lines("atif", tmp_path / "first.jsonl")
    other = Store(tmp_path / "other.db")
    assert len(other.take(tmp_path / "first.jsonl").sessions) == len(LINES)
    second = other.lines("atif", tmp_path / "second.jsonl")
    assert list(map(told, second)) == list(map(told, first))


def spans(exporter: InMemorySpanExporter) -> None:
    """A conversation of two calls by the official SDK and its names of attributes."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    question = {"role": "user", "parts": [{"type": "text", "content": "q"}]}
    call = {"type": "tool_call", "id": "c1", "name": "look", "arguments": {"at": 1}}
    asks = {"role": "assistant", "parts": [call], "finish_reason": "tool_call"}
    answer = {"type": "tool_call_response", "id": "c1", "response": "42"}
    result = {"role": "tool", "parts": [answer]}
    says = {"role": "assistant", "parts": [{"type": "text", "content": "42"}]}
    history = [question, {k: v for k, v in asks.items() if k != "finish_reason"}, result]
    for asked, reply in (([question], asks), (history, says)):
        with tracer.start_as_current_span("chat policy") as span:
            span.set_attribute(gen_ai.GEN_AI_CONVERSATION_ID, "talk")
            span.set_attribute(gen_ai.GEN_AI_RESPONSE_MODEL, "policy")
            span.set_attribute(gen_ai.GEN_AI_INPUT_MESSAGES, json.dumps(asked))
            span.set_attribute(gen_ai.GEN_AI_OUTPUT_MESSAGES, json.dumps([reply]))


@pytest.mark.parametrize("form", ["otlp", "sdk"])
def test_spans_of_one_conversation_are_a_session(store: Store, tmp_path: Path, form: str) -> None:
    exporter = InMemorySpanExporter()
    spans(exporter)
    finished = exporter.get_finished_spans()
    file = tmp_path / "spans.jsonl"
    if form == "otlp":
        file.write_text(MessageToJson(encode_spans(finished)))
    else:
        file.write_text("".join(span.to_json(indent=None) + "\n" for span in finished))
    assert store.take(file).calls == 2
    (session,) = store.sessions()
    assert session.record.name == "otel-talk"
    assert conversation(session) == [
        ("user", "q", None, []),
        ("assistant", None, None, ["look"]),
        ("tool", "42", None, []),
        ("assistant", "42", None, []),
    ]
    assert session.calls[1].parent_call_id == session.calls[0].id


@pytest.mark.parametrize(
    ("text", "form", "reason"),
    [
        ("dear diary", None, "not recognised"),
        ('{"messages": 1}', "chat", "no `messages`"),
        ('{"messages": [{}]}', "chat", "not OpenAI's"),
        ('{"a": 1}\nno', "chat", "no `messages`"),
        ('{"messages": []}\nno', "chat", "line 2: not JSON"),
        ("[1]\n", "codex", "line 1: not a JSON object"),
        ('{"steps": []}', "atif", "schema_version"),
        ('{"schema_version": "ATIF-v1.7", "steps": [{}]}', "atif", "not ATIF's"),
        ('{"sessionId": "x"}', "claude-code", "no reply of Claude Code"),
        ('{"type": "x", "payload": {}}', "codex", "no reply of Codex"),
        ('{"context": {}, "attributes": {}}', "otel", "no span has"),
    ],
)
def test_what_is_not_of_a_format_is_refused_with_the_place(
    store: Store, tmp_path: Path, text: str, form: str | None, reason: str
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(text)
    with pytest.raises(NotReadable, match=reason):
        store.take(file, form)
