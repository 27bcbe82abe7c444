"""Harnesses' own requests reach a model whose template takes few orders of roles.

It takes fewer orders than they send, and their conversations are continued exactly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bridle.engine.scripted import ScriptedEngine
from bridle.proxy.continuation.roles import MESSAGES_COMBINED, SYSTEM_AS_USER, SYSTEMS_MERGED
from bridle.proxy.settings import OtherModel
from bridle.recipes.models.tiny_tokenizer import SPECIAL_TOKENS, train_tokenizer

TESTS = Path(__file__).parents[1]
FIXTURES = TESTS / "dialects" / "fixtures"
ARGUMENTS = {
    "exec_command": '{"cmd": "ls"}',
    "Bash": '{"command": "ls", "description": "List."}',
    "look_up": '{"word": "café"}',
}


def trl_template(name: str) -> str:
    found = find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("the genuine templates come with trl")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a model directory with a template."""
    made: dict[str, Path] = {}

    def make(template: str, eos: str = "<|im_end|>", *special: str) -> Path:
        if template not in made:
            directory = tmp_path_factory.mktemp("roles")
            train_tokenizer(
                directory,
                [(FIXTURES / "codex.json").read_text()],
                template=template,
                special_tokens=(*SPECIAL_TOKENS, *special),
                eos_token=eos,
            )
            made[template] = directory
        return made[template]

    return make


@pytest.fixture
def serve(start_proxy: Any) -> Iterator[Callable[..., Any]]:
    """Starts an engine that plays a script, and a proxy before it; returns both."""
    with ExitStack() as stack:

        def start(directory: Path, script: Any, **fields: Any) -> tuple[Any, ScriptedEngine]:
            engine = stack.enter_context(ScriptedEngine(directory, script, max_model_len=200_000))
            return start_proxy(engine.base_url, **fields), engine

        yield start


def qwen_agent(request: Any) -> str:
    """Calls the first tool that it knows twice, then replies."""
    done = request.prompt_text.count("<tool_response>")
    if done >= 2:
        return "Done thinking.\n</think>\n\nAll done."
    name = next(t["function"]["name"] for t in request.tools if t["function"]["name"] in ARGUMENTS)
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in json.loads(ARGUMENTS[name]).items()
    )
    return (
        f"Let me see.\n</think>\n\n<tool_call>\n<function={name}>\n{parameters}"
        "</function>\n</tool_call>"
    )


def codex(url: str, turns: int) -> None:
    """Codex' own request and the items that it adds after each response."""
    body = json.loads((FIXTURES / "codex.json").read_text()) | {"stream": False}
    roles = [item.get("role") for item in body["input"]]
    body["input"] = body["input"][: roles.index(None)]
    for turn in range(turns):
        reply = httpx.post(f"{url}/s/codex/v1/responses", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        items = reply.json()["output"]
        body["input"] += items
        for item in items:
            if item["type"] == "function_call":
                output = {"type": "function_call_output", "call_id": item["call_id"]}
                body["input"].append({**output, "output": "one.txt"})
        if turn == 1:
            late = {"type": "input_text", "text": "Mind the sandbox."}
            body["input"].append({"type": "message", "role": "developer", "content": [late]})


def claude_code(url: str, turns: int) -> None:
    """Claude Code's own request, with its inline system message, and what it adds."""
    body = json.loads((FIXTURES / "claude_code.json").read_text()) | {"stream": False}
    body["messages"] = body["messages"][:2]
    for turn in range(turns):
        reply = httpx.post(f"{url}/s/claude/v1/messages?beta=true", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        blocks = reply.json()["content"]
        body["messages"].append({"role": "assistant", "content": blocks})
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "one.txt"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        body["messages"].append({"role": "user", "content": results or "Go on."})
        if turn == 1:
            body["messages"].append({"role": "system", "content": "Mind the sandbox."})


def assert_one_exact_line(bench: Any) -> list[Any]:
    """Every call continues the one before it, in meaning and in tokens; returns them."""
    calls = bench.calls()
    assert len({call.session_id for call in calls}) == 1
    for before, call in pairwise(calls):
        assert call.parent_call_id == before.id
        assert call.break_reason is None
        prompt = bench.reader.prompt_token_ids(call.id)
        path = np.concatenate(
            [bench.reader.prompt_token_ids(before.id), bench.reader.sampled(before.id)[0].token_ids]
        )
        assert np.array_equal(prompt[: len(path)], path)
    return calls


@pytest.mark.parametrize("harness", [codex, claude_code])
def test_a_harness_with_several_system_messages_works_on_a_template_that_takes_one(
    model: Any, serve: Any, harness: Any
) -> None:
    directory = model(trl_template("qwen3_5_think"))
    bench, engine = serve(directory, qwen_agent, tokenizer_dir=directory)
    harness(bench.url, 5)
    calls = assert_one_exact_line(bench)
    assert len(calls) == 5
    for request in engine.requests:
        roles = [message["role"] for message in request.messages]
        assert "system" not in roles[1:]
    wanted = SYSTEMS_MERGED if harness is codex else SYSTEM_AS_USER
    assert wanted in {note.name for note in calls[0].notes}
    assert SYSTEM_AS_USER in {note.name for note in calls[-1].notes}
    # The record has what the client sent.
    recorded = calls[0].conversation.tail
    assert [message.role for message in recorded].count("system") == 2
    last = engine.requests[-1].prompt_text
    assert last.count("Mind the sandbox.") == 1
    assert last.index("Mind the sandbox.") > last.index("<tool_response>")


CHAT = "{url}/s/roles/v1/chat/completions"
SYSTEM = {"role": "system", "content": "Be brief."}


def chat(url: str, messages: list[Any], **more: Any) -> httpx.Response:
    body = {"model": "m", "messages": messages, **more}
    return httpx.post(CHAT.format(url=url), json=body, timeout=60)


def test_neighbours_of_one_role_are_combined_and_the_conversation_stays_exact(
    model: Any, serve: Any
) -> None:
    directory = model(
        trl_template("gemma3"), "<end_of_turn>", "<bos>", "<start_of_turn>", "<end_of_turn>"
    )
    bench, engine = serve(directory, lambda _: "A house.", tokenizer_dir=directory)
    messages: list[Any] = [SYSTEM, SYSTEM, {"role": "user", "content": "One."}]
    for turn in range(4):
        messages.append({"role": "user", "content": f"And {turn}?"})
        reply = chat(bench.url, messages)
        assert reply.status_code == 200, reply.text
        messages += [reply.json()["choices"][0]["message"], SYSTEM]
    calls = assert_one_exact_line(bench)
    assert {MESSAGES_COMBINED, SYSTEMS_MERGED, SYSTEM_AS_USER} <= {
        note.name for note in calls[-1].notes
    }
    shown = engine.requests[-1].prompt_text
    assert [shown.count(f"And {turn}?") for turn in range(4)] == [1, 1, 1, 1]


def test_user_text_after_a_tool_result_becomes_a_part_of_it_where_the_template_refuses_it(
    model: Any, serve: Any
) -> None:
    template = (TESTS / "lineage" / "templates" / "mistral.jinja").read_text()
    marks = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
    directory = model(template, "</s>", "<s>", "</s>", *marks)

    def script(request: Any) -> str:
        if request.messages[-1]["role"] == "user":
            return (
                '[TOOL_CALLS] [{"name": "look_up", "arguments": {"word": "a"}, "id": "a1b2c3d4e"}]'
            )
        return "Twelve."

    bench, engine = serve(directory, script, tokenizer_dir=directory)
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    messages: list[Any] = [{"role": "user", "content": "How many?"}]
    first = chat(bench.url, messages, tools=[tool]).json()["choices"][0]["message"]
    (made,) = first["tool_calls"]
    messages += [first, {"role": "tool", "tool_call_id": made["id"], "content": "12 cafés"}]
    messages.append({"role": "user", "content": "Be quick."})
    reply = chat(bench.url, messages, tools=[tool])
    assert reply.status_code == 200, reply.text
    result = engine.requests[-1].messages[-1]
    assert result["role"] == "tool"
    assert "12 cafés" in result["content"]
    assert "Be quick." in result["content"]
    assert_one_exact_line(bench)


def test_a_template_that_takes_all_roles_gets_the_messages_as_they_are(
    model_dir: Path, serve: Any
) -> None:
    bench, engine = serve(model_dir, lambda _: "A house.", tokenizer_dir=model_dir)
    messages: list[Any] = [SYSTEM, SYSTEM, {"role": "user", "content": "One."}]
    messages += [{"role": "user", "content": "Two."}, SYSTEM]
    assert chat(bench.url, messages).status_code == 200
    assert list(engine.requests[-1].messages) == messages
    assert bench.call().notes == ()


@pytest.mark.parametrize(
    ("asked", "sent", "changed"),
    [("high", "xhigh", True), ("minimal", "low", True), ("low", "low", False), ("none", "", False)],
)
def test_an_effort_that_the_template_refuses_becomes_the_nearest_that_it_takes(
    model: Any, serve: Any, asked: str, sent: str, changed: bool
) -> None:
    """Qwen3.8 takes xhigh, medium and low, and none of them where thinking is disabled."""
    strict = model(trl_template("qwen3_8"))
    bench, engine = serve(strict, lambda _: "Yes.\n</think>\n\nYes.", tokenizer_dir=strict)
    body = {"model": "m", "messages": [{"role": "user", "content": "One."}]}
    reply = httpx.post(CHAT.format(url=bench.url), json=body | {"reasoning_effort": asked})
    assert reply.status_code == 200, reply.text
    shown = re.findall(r"effort is set to (\w+)", engine.requests[-1].prompt_text)
    assert shown == [sent] * bool(sent)
    notes = {note.name: note.detail for note in bench.call().notes}
    assert notes == ({"reasoning_effort_changed": f"{asked} as {sent}"} if changed else {})


def test_a_tool_without_parameters_gets_a_schema_where_the_template_reads_one(
    model: Any, serve: Any, model_dir: Path
) -> None:
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    reads = "{% for t in tools or [] %}{{ t.function.parameters.properties.keys() }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"model": "m", "messages": [{"role": "user", "content": "One."}], "tools": tools}
    for template, changed in ((reads + plain, True), (None, False)):
        directory = model_dir if template is None else model(template)
        bench, engine = serve(directory, lambda _: "A house.", tokenizer_dir=directory)
        reply = httpx.post(CHAT.format(url=bench.url), json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        schema = {"parameters": {"type": "object", "properties": {}}} if changed else {}
        assert engine.requests[-1].tools[0]["function"] == {"name": "look"} | schema
        notes = {note.name for note in bench.calls()[-1].notes}
        assert ("tool_parameters_added" in notes) is changed


def test_without_a_tokenizer_the_engine_is_asked_what_its_template_takes(
    model: Any, serve: Any
) -> None:
    bench, engine = serve(model(trl_template("qwen3_5_think")), qwen_agent)
    codex(bench.url, 3)
    calls = bench.calls()
    assert [call.parent_call_id for call in calls[1:]] == [call.id for call in calls[:-1]]
    for call, request in zip(calls, engine.requests, strict=True):
        assert SYSTEMS_MERGED in {note.name for note in call.notes}
        assert [message["role"] for message in request.messages].count("system") == 1


def test_a_frozen_model_has_rules_of_its_own(model: Any, serve: Any, model_dir: Path) -> None:
    strict = model(trl_template("qwen3_5_think"))
    with ScriptedEngine(strict, lambda _: "Yes.\n</think>\n\nYes.") as other:
        models = {"judge": OtherModel((other.base_url,))}
        bench, engine = serve(
            model_dir, lambda _: "A house.", tokenizer_dir=model_dir, other_models=models
        )
        messages: list[Any] = [SYSTEM, SYSTEM, {"role": "user", "content": "One."}]
        assert chat(bench.url, messages).status_code == 200
        assert (
            httpx.post(
                CHAT.format(url=bench.url),
                json={"model": "judge", "messages": messages},
                timeout=60,
            ).status_code
            == 200
        )
        assert list(engine.requests[-1].messages) == messages
        assert [message["role"] for message in other.requests[-1].messages] == ["system", "user"]


def test_counting_tokens_takes_the_same_orders_of_roles(model: Any, serve: Any) -> None:
    directory = model(trl_template("qwen3_5_think"))
    bench, _ = serve(directory, qwen_agent, tokenizer_dir=directory)
    body = {"model": "m", "system": "Be brief.", "messages": [{"role": "user", "content": "One."}]}
    body["messages"].append({"role": "system", "content": "Be quick."})  # type: ignore[attr-defined]
    reply = httpx.post(f"{bench.url}/v1/messages/count_tokens", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["input_tokens"] > 10


def test_tool_results_that_a_template_has_no_place_for_are_refused_with_the_cause(
    model: Any, serve: Any
) -> None:
    directory = model(
        trl_template("gemma3"), "<end_of_turn>", "<bos>", "<start_of_turn>", "<end_of_turn>"
    )
    bench, engine = serve(directory, lambda _: "A house.", tokenizer_dir=directory)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "One."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "12"},
    ]
    reply = chat(bench.url, messages)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert "refuses tool calls" in message
    assert "--chat-template" in message

    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    first = chat(bench.url, messages[:1], tools=tools)
    assert first.status_code == 400
    assert first.json()["error"]["message"] == message
    assert chat(bench.url, messages[:1], tools=tools, tool_choice="none").status_code == 200
    assert chat(bench.url, messages[:1]).status_code == 200
    assert len(engine.requests) == 2


def test_a_refusal_by_an_unknown_template_names_the_remedy(
    raw_engine: Any, start_proxy: Any, refusing: Any
) -> None:
    raw_engine.answer = refusing
    bench = start_proxy(raw_engine.base_url)
    messages: list[Any] = [SYSTEM, SYSTEM, {"role": "user", "content": "One."}]
    reply = chat(bench.url, messages)
    assert reply.status_code == 400
    assert "System message must be" in reply.json()["error"]["message"]
    assert "--tokenizer" in reply.json()["error"]["message"]
    plain = chat(bench.url, messages[1:])
    assert "--tokenizer" not in plain.json()["error"]["message"]


@pytest.fixture
def refusing() -> Any:
    async def answer(receive: Any, send: Any) -> None:
        error = {"message": "System message must be at the beginning.", "type": "BadRequestError"}
        body = json.dumps({"error": {**error, "code": 400, "param": None}}).encode()
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return answer
