"""A dialect from another distribution: Cohere's chat API, with no line of it in ours."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedCall, ScriptedReply
from bridle.errors import UsageError
from bridle.proxy.dialects.registry import served
from bridle.reconstruct.audit import audit
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus

DISTRIBUTION = Path(__file__).parents[1] / "distributions" / "bridle-cohere"
MODULE = DISTRIBUTION / "bridle_cohere.py"
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
]
CALLS = (ScriptedCall("add", {"a": 1, "b": 2}), ScriptedCall("add", {"a": 3, "b": 4}))
http = httpx.Client(timeout=60, trust_env=False)


def two_turns(request: Any) -> ScriptedReply:
    if request.messages[-1]["role"] == "tool":
        return ScriptedReply("The sum is 3 and 7.", reasoning="one two three")
    return ScriptedReply("one", reasoning="four five", tool_calls=CALLS)


@pytest.fixture
def bench(stage: Any, start_proxy: Any, model_dir: Path) -> Any:
    stage.play = two_turns
    named = (f"{MODULE}:COHERE",)
    return start_proxy(stage.engine.base_url, tokenizer_dir=model_dir, dialects=named)


def install(target: Path) -> None:
    """Put the distribution into ``target`` as an installer does.

    It has its module, and the metadata that its ``pyproject.toml`` asks for.
    """
    project = tomllib.loads((DISTRIBUTION / "pyproject.toml").read_text())["project"]
    (target / MODULE.name).write_text(MODULE.read_text())
    metadata = target / f"bridle_cohere-{project['version']}.dist-info"
    metadata.mkdir()
    name, version = project["name"], project["version"]
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def installed(tmp_path: Path, stage: Any, model_dir: Path) -> Iterator[tuple[str, Path]]:
    """``bridle proxy`` where the distribution is installed: its URL and its store."""
    stage.play = two_turns
    site, store = tmp_path / "site", tmp_path / "installed.db"
    site.mkdir()
    install(site)
    argv = ["proxy", "--engine", stage.engine.base_url, "--store", str(store), "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "bridle", *argv, "--tokenizer", str(model_dir), "--json"],
        env={**os.environ, "PYTHONPATH": str(site), "BRIDLE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"], store
        finally:
            process.send_signal(signal.SIGTERM)


def body(messages: list[Any], **more: Any) -> dict[str, Any]:
    return {"model": "command-a", "messages": messages, "tools": TOOLS, **more}


def folded(events: list[Any]) -> dict[str, Any]:
    """The message of a stream, put together as Cohere's documentation describes it."""
    message: dict[str, Any] = {"role": "assistant"}
    for event in events:
        delta = event.get("delta", {}).get("message", {}) if event != "[DONE]" else {}
        match event:
            case {"type": "content-start"}:
                message.setdefault("content", []).append(dict(delta["content"]))
            case {"type": "content-delta"}:
                for kind, text in delta["content"].items():
                    message["content"][-1][kind] += text
            case {"type": "tool-call-start"}:
                message.setdefault("tool_calls", []).append(delta["tool_calls"])
            case {"type": "tool-call-delta"}:
                pieces = delta["tool_calls"]["function"]["arguments"]
                message["tool_calls"][-1]["function"]["arguments"] += pieces
    return message


def converse(url: str, read: Any, stream: bool, key: str = "x") -> list[dict[str, Any]]:
    """Two turns of an agent that runs a tool twice; the replies' messages."""
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1+2 and 3+4?"}]}]
    replies = []
    for turn in range(2):
        sent = http.post(
            f"{url}/v2/chat",
            json=body(messages, stream=stream),
            headers={"authorization": f"Bearer {key}"},
        )
        assert sent.status_code == 200, sent.text
        reason = "TOOL_CALL" if turn == 0 else "COMPLETE"
        if stream:
            events = read(sent.content)
            assert events[-1] == "[DONE]"
            assert events[-2]["delta"]["finish_reason"] == reason
            assert events[-2]["delta"]["usage"]["tokens"]["output_tokens"] > 0
            reply = folded(events)
        else:
            assert sent.json()["finish_reason"] == reason
            reply = sent.json()["message"]
        replies.append(reply)
        messages.append(reply)
        for call in reply.get("tool_calls", ()):
            document = {"type": "document", "document": {"data": '{"sum": 3}'}}
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": [document]})
    return replies


def check(reader: Reader, stage: Any, replies: list[dict[str, Any]]) -> None:
    """The record has both calls, and the second continues the first by its exact tokens."""
    first, second = [call for one in reader.sessions() for call in reader.calls(one.id)]
    assert [first.dialect, second.dialect] == ["cohere_chat", "cohere_chat"]
    assert [first.status, second.status] == [CallStatus.COMPLETE] * 2
    assert (second.parent_call_id, second.lineage_rule) == (first.id, "minted_id")
    assert second.break_reason is None
    path = [*reader.prompt_token_ids(first.id), *reader.sampled(first.id)[0].token_ids]
    assert list(stage.requests[1].prompt_ids)[: len(path)] == path
    assert [part["type"] for part in replies[0]["content"]] == ["thinking", "text"]
    arguments = [json.loads(call["function"]["arguments"]) for call in replies[0]["tool_calls"]]
    assert arguments == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert replies[1]["content"][-1]["text"].strip() == "The sum is 3 and 7."
    assert not [v for one in audit(reader, bodies=True) for v in one.violations]


def test_an_installed_dialect_is_served_without_being_named(
    installed: tuple[str, Path], stage: Any, events: Any
) -> None:
    url, store = installed
    replies = converse(url, events, stream=True)
    reader = Reader(str(store))
    check(reader, stage, replies)
    reader.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_dialect_in_a_file_is_served(bench: Any, stage: Any, events: Any, stream: bool) -> None:
    check(bench.reader, stage, converse(bench.url, events, stream))


def test_a_session_hands_out_the_foreign_clients_variables(bench: Any, events: Any) -> None:
    made = http.post(f"{bench.url}/bridle/v1/sessions", json={}).json()
    root = f"{bench.url}/s/{made['id']}"
    assert made["base_urls"]["cohere"] == made["environment"]["CO_API_URL"] == root
    assert made["environment"]["OPENAI_BASE_URL"] == f"{root}/v1"
    converse(root, events, stream=False, key=made["environment"]["CO_API_KEY"])
    assert {call.session_id for call in bench.calls()} == {made["id"]}


def test_the_foreign_dialects_refusals_have_its_shape(bench: Any) -> None:
    refused = http.post(f"{bench.url}/v2/chat", json=body([]))
    assert refused.status_code == 400
    assert refused.json() == {"id": "", "message": "messages: must not be empty"}
    assert http.get(f"{bench.url}/v2/chat").headers["allow"] == "POST"
    hi = [{"role": "user", "content": "hi"}]
    documents = http.post(f"{bench.url}/v2/chat", json=body(hi, documents=["x"]))
    assert documents.json()["message"].endswith("send their text in a message")


def test_an_overflow_has_the_foreign_dialects_words(start_proxy: Any, raw_engine: Any) -> None:
    said = "This model's maximum context length is 10 tokens. However, your request has 30 input "

    async def answer(_receive: Any, send: Any) -> None:
        refusal = json.dumps({"error": {"message": said + "tokens.", "code": 400}}).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send({"type": "http.response.body", "body": refusal})

    raw_engine.answer = answer
    bench = start_proxy(raw_engine.base_url, dialects=(f"{MODULE}:COHERE",))
    reply = http.post(f"{bench.url}/v2/chat", json=body([{"role": "user", "content": "hi"}]))
    assert reply.status_code == 400
    assert reply.json()["message"].startswith("too many tokens: size limit exceeded by 20 tokens")


def test_clients_get_the_models_in_their_own_providers_shape(bench: Any) -> None:
    def listed(header: str) -> Any:
        return http.get(f"{bench.url}/v1/models", headers={header: "1"}).json()

    assert listed("x-fern-sdk-name")["models"][0]["endpoints"] == ["chat"]
    assert listed("x-goog-api-key")["models"][0]["name"].startswith("models/")
    assert listed("anthropic-version")["data"][0]["type"] == "model"
    assert listed("accept-language")["object"] == "list"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("COHERE = 1", "is no dialect but a int: name a Dialect"),
        ("from dataclasses import replace\nfrom bridle.proxy.dialects.registry import CHAT\n"
         "COHERE = replace(CHAT)", "there is a dialect chat already"),
        ("from dataclasses import replace\nfrom bridle.proxy.dialects.registry import CHAT\n"
         "COHERE = replace(CHAT, name='c' * 17)", "must have 1 to 16 characters"),
    ],
)  # fmt: skip
def test_a_dialect_that_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path, source: str, problem: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(UsageError, match=re.escape(problem)):
        served([f"{file}:COHERE"])
