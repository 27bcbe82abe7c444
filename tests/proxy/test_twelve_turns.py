"""Twelve turns with parallel tools, by official clients, in exact and in rendered mode.

The template strips thinking and writes arguments anew. Exact mode gives one line, and rendered mode
named breaks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from bridle.engine.scripted import ScriptedCall, ScriptedReply
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.samples.rules import DEFAULT_RULES, trainable
from bridle.reconstruct.session import LoadedSession
from bridle.store.records import BreakReason, CallStatus, Continuation

PARAMETERS = {
    "type": "object",
    "properties": {"word": {"type": "string"}, "page": {"type": "integer"}},
}
LOOK_UP = {"name": "look_up", "description": "Find a word.", "parameters": PARAMETERS}
QUESTIONS = ("What is a café?", "And a library?")
RESULT = {"text": "page 12"}
"""The text of every tool result."""
TURNS_EACH = 6
"""Calls per question, the last of them a text."""


def librarian(request: Any) -> ScriptedReply:
    """Thinks, then looks two words up in its own spelling of JSON, five times; then answers."""
    roles = [message["role"] for message in request.messages]
    since = roles[::-1].index("user")
    step = roles[len(roles) - since :].count("assistant")
    thought = f"Step {step} of question {roles.count('user')}. Look closer."
    if step == TURNS_EACH - 1:
        return ScriptedReply("A house — ☕.", reasoning=thought)
    calls = [
        ScriptedCall("look_up", f'{{"word":"caf\\u00e9 {n}",  "page":{step}}}') for n in (1, 2)
    ]
    return ScriptedReply("Let me see." if step % 2 else "", reasoning=thought, tool_calls=calls)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3's shape: thoughts before the last question go, arguments are rendered from JSON."""
    directory = tmp_path_factory.mktemp("qwen3")
    template = Path(__file__).parents[1] / "lineage" / "templates" / "qwen3.jinja"
    texts = [json.dumps(LOOK_UP), *QUESTIONS, Path(__file__).read_text()]
    train_tokenizer(directory, texts, template=template.read_text())
    return directory


def chat(url: str, *, stream: bool, rewrite: Callable[[Any], Any]) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    messages: list[Any] = []
    tools: Any = [{"type": "function", "function": LOOK_UP}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(TURNS_EACH):
            fields: Any = {"model": "m", "messages": messages, "tools": tools}
            if stream:
                with client.chat.completions.stream(**fields) as events:
                    reply = events.get_final_completion()
            else:
                reply = client.chat.completions.create(**fields)
            message = reply.choices[0].message
            messages.append(rewrite(message.model_dump(exclude_none=True)))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": RESULT["text"]}
                for call in message.tool_calls or ()
            ]


def verbatim(message: Any) -> Any:
    message.pop("parsed", None)
    for call in message.get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
    return message


def as_javascript_clients_do(message: Any) -> Any:
    """Reasoning dropped, content ``null``, arguments parsed and written again."""
    kept = {"role": "assistant", "content": message.get("content") or None}
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        function = {
            "name": call["function"]["name"],
            "arguments": json.dumps(arguments, separators=(",", ":"), ensure_ascii=False),
        }
        kept.setdefault("tool_calls", []).append({**call, "function": function})
    return kept


def responses(url: str, *, stored: bool, referenced: bool = False) -> None:
    """``referenced``: earlier items are named by their ids alone."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    tools: Any = [{"type": "function", **LOOK_UP, "strict": False}]
    items: list[Any] = []
    previous: str | None = None
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        for _ in range(TURNS_EACH):
            more = {"previous_response_id": previous} if stored and previous else {}
            with client.responses.stream(
                model="m", input=items, tools=tools, instructions="Be brief.", **more
            ) as events:
                reply = events.get_final_response()
            previous = reply.id
            echoed = [item.model_dump(exclude_none=True) for item in reply.output]
            for item in echoed:
                item.pop("parsed_arguments", None)
                for part in item.get("content") or ():
                    part.pop("parsed", None)
            if referenced:
                echoed = [{"type": "item_reference", "id": item["id"]} for item in echoed]
            items = [] if stored else [*items, *echoed]
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": RESULT["text"]}
                for item in reply.output
                if item.type == "function_call"
            ]


def messages_api(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
    tools: Any = [{"name": "look_up", "description": "Find a word.", "input_schema": PARAMETERS}]
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(TURNS_EACH):
            with client.messages.stream(
                model="m", max_tokens=2048, tools=tools, messages=messages, system="Be brief.",
                thinking={"type": "enabled", "budget_tokens": 1024},
            ) as events:  # fmt: skip
                reply = events.get_final_message()
            blocks = [block.to_dict() for block in reply.content]
            messages.append({"role": "assistant", "content": blocks})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": RESULT["text"]}
                for block in reversed(reply.content)  # in the order of completion
                if block.type == "tool_use"
            ]
            if results:
                messages.append({"role": "user", "content": results})


def langchain(url: str, *, responses_api: bool) -> None:
    model = ChatOpenAI(
        model="m", base_url=f"{url}/v1", api_key="x", use_responses_api=responses_api,
        max_retries=0,
    ).bind_tools([{"type": "function", "function": LOOK_UP}])  # fmt: skip
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append(HumanMessage(question))
        for _ in range(TURNS_EACH):
            reply = model.invoke(messages)
            messages.append(reply)
            messages += [
                ToolMessage(RESULT["text"], tool_call_id=call["id"]) for call in reply.tool_calls
            ]


CLIENTS: dict[str, Callable[[str], None]] = {
    "chat": lambda url: chat(url, stream=False, rewrite=verbatim),
    "chat_stream": lambda url: chat(url, stream=True, rewrite=as_javascript_clients_do),
    "responses": lambda url: responses(url, stored=False),
    "responses_stored": lambda url: responses(url, stored=True),
    "responses_referenced": lambda url: responses(url, stored=False, referenced=True),
    "messages": messages_api,
    "langchain_chat": lambda url: langchain(url, responses_api=False),
    "langchain_responses": lambda url: langchain(url, responses_api=True),
}


@pytest.fixture(params=CLIENTS)
def play(request: pytest.FixtureRequest, stage: Any) -> Callable[[Any], Any]:
    """Twelve turns of one client through a proxy; the session's calls, in order."""
    stage.play = librarian

    def run(bench: Any) -> Any:
        CLIENTS[request.param](f"{bench.url}/s/library")
        calls = bench.calls()
        assert [call.status for call in calls] == [CallStatus.COMPLETE] * 12
        parents = [call.parent_call_id for call in calls]
        assert parents == [None, *(call.id for call in calls[:-1])]
        assert {call.lineage_rule for call in calls[1:]} <= {"minted_id", "content"}
        assert audit_session(bench.reader, calls[0].session_id).clean
        return calls

    return run


@pytest.mark.sampled(2)
def test_exact_mode_makes_one_branch_without_breaks(
    play: Any, stage: Any, start_proxy: Any, model_dir: Path
) -> None:
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    calls = play(bench)
    assert Counter(call.break_reason for call in calls) == {None: 12}
    tree = LoadedSession.load(bench.reader, calls[0].session_id).tree
    assert len(tree.branches()) == 1


def test_rendered_mode_names_what_each_turn_breaks_on(
    play: Any, stage: Any, start_proxy: Any, model_dir: Path
) -> None:
    bench = start_proxy(
        stage.engine.base_url, tokenizer_dir=model_dir, continuation=Continuation.RENDERED
    )
    play(bench)
    calls = bench.judged()
    reasons = {call.break_reason for call in calls} - {None}
    assert reasons
    assert reasons <= {
        BreakReason.REASONING_DROPPED,
        BreakReason.ARGUMENTS_RESERIALISED,
        BreakReason.TEMPLATE_REWROTE_HISTORY,
        BreakReason.EDITED,
    }
    tree = LoadedSession.load(bench.reader, calls[0].session_id).tree
    assert len(tree.branches()) > 1
    assert audit_session(bench.reader, calls[0].session_id).clean


NOISY = "Chunk ID: {}\nWall time: 0.{} seconds\npage 12"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.sampled(3)
def test_each_client_re_enters_its_session_at_any_turn(
    client: str, stage: Any, start_proxy: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.play = librarian
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    monkeypatch.setitem(RESULT, "text", NOISY.format("a1", 1))
    CLIENTS[client](f"{bench.url}/s/library")
    recorded = bench.calls()
    monkeypatch.setitem(RESULT, "text", NOISY.format("b2", 2))
    for turn in (1, 4, 9):
        asked = len(stage.requests)
        origin = {"session": recorded[0].session_id, "call": recorded[turn - 1].id}
        again = httpx.post(
            f"{bench.url}/bridle/v1/sessions", json={"origin": origin}, timeout=60
        ).json()["id"]
        CLIENTS[client](f"{bench.url}/s/{again}")

        calls = bench.reader.calls(again)
        assert [call.replayed_call_id for call in calls] == [
            call.id if number < turn else None for number, call in enumerate(recorded, 1)
        ]
        assert len(stage.requests) - asked == 13 - turn, "no replayed turn asks an engine"
        for then, now in zip(recorded[:turn], calls, strict=False):
            ids = [bench.reader.prompt_token_ids(call.id) for call in (then, now)]
            assert ids[0].tolist() == ids[1].tolist()
        assert {call.break_reason for call in calls} == {None}
        audited = audit_session(bench.reader, again)
        assert audited.clean, audited.violations
        live = sum(call.sampled_tokens for call in calls[turn - 1 :])
        assert audited.conservation.captured == live
        assert sum(call.sampled_tokens for call in calls[: turn - 1]) == 0
        loaded = LoadedSession.load(bench.reader, again)
        assert len(loaded.tree.branches()) == 1
        reasons = {trainable(call, loaded, DEFAULT_RULES)[0].excluded for call in loaded.calls}
        assert reasons == ({(), ((0, 0, "replayed"),)} if turn > 1 else {()})
