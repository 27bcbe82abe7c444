"""The scripted engine: what a script sees, what its replies become, and its faults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.processors import TemplateProcessing

from bridle.engine.contract.contract import MISSING_LOGPROB
from bridle.engine.scripted import (
    Cut,
    Fail,
    Refuse,
    Script,
    ScriptedCall,
    ScriptedEngine,
    ScriptedReply,
    ScriptedRequest,
    Stall,
)
from support.processes import until

Serve = Callable[[Script], Any]
CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture
def serve(tiny_dir: Path) -> Serve:
    @contextmanager
    def run(script: Script) -> Iterator[ScriptedEngine]:
        with ScriptedEngine(tiny_dir, script, served_model_name="teacher") as engine:
            yield engine

    return run


def ask(engine: ScriptedEngine, **extra: Any) -> httpx.Response:
    body = {
        "model": "teacher",
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "return_token_ids": True,
    }
    return httpx.post(engine.base_url + CHAT, json=body | extra, timeout=20)


def lines(engine: ScriptedEngine, **extra: Any) -> Iterator[str]:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with httpx.stream("POST", engine.base_url + CHAT, json=body | extra, timeout=20) as reply:
        assert reply.status_code == 200
        yield from (line for line in reply.iter_lines() if line)


def test_a_script_sees_messages_tools_and_prompt(serve: Serve) -> None:
    with serve(lambda request: "ok") as engine:
        messages = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi", "odd": {"kept": True}},
        ]
        first = ask(engine, messages=messages, tools=TOOLS, temperature=0.5).json()
        seen: ScriptedRequest = engine.requests[-1]
        assert list(seen.messages) == messages
        assert list(seen.tools) == TOOLS
        assert "be brief" in seen.prompt_text
        assert seen.sampling.temperature == 0.5
        assert list(seen.prompt_ids) == first["prompt_token_ids"]
        ask(engine, kv_transfer_params={"prompt_token_ids": [5, 6, 7]})
        assert list(engine.requests[-1].prompt_ids) == [5, 6, 7]
        assert engine.requests[-1].messages[0]["content"] == "hi"


def test_a_structured_reply_becomes_markup_that_parses_back(serve: Serve) -> None:
    reply = ScriptedReply(
        "Let me see.",
        reasoning="Adding is easy.",
        tool_calls=(ScriptedCall("add", {"a": "é\n"}), ScriptedCall("add", '{"b": 2}')),
    )
    with serve(lambda request: reply) as engine:
        choice = ask(engine, tools=TOOLS).json()["choices"][0]
        message = choice["message"]
        assert message["reasoning"].strip() == "Adding is easy."
        assert message["content"].strip() == "Let me see."
        arguments = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
        assert arguments == [{"a": "é\n"}, {"b": 2}]
        assert choice["finish_reason"] == "tool_calls"
        assert engine.backend.tokenizer.decode(choice["token_ids"]) == (
            reply.markup() + "<|im_end|>"
        )


@pytest.fixture
def other_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    """A model that writes Mistral's markup, with five ids that end its replies.

    The lowest is one that its template never writes.
    """
    directory = shutil.copytree(tiny_dir, tmp_path / "other")
    backend = BackendTokenizer.from_file(str(directory / "tokenizer.json"))
    names = ["<low>", "<turn>", "<calls>", "[TOOL_CALLS]", "[ARGS]"]
    backend.add_special_tokens(names)
    backend.save(str(directory / "tokenizer.json"))
    ids = [backend.token_to_id(name) for name in names[:3]]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}"
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}\n"
        "{% if m.role == 'assistant' %}{{ '<calls>' if m.tool_calls else '<turn>' }}\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return directory


def test_a_reply_ends_as_the_template_ends_it(other_dir: Path) -> None:
    replies = iter([ScriptedReply("four"), ScriptedReply(tool_calls=(ScriptedCall("add", {}),))])
    with ScriptedEngine(other_dir, lambda _: next(replies)) as engine:
        decode = engine.backend.tokenizer.decode
        for end in ("<turn>", "<calls>"):
            choice = ask(engine, model=engine.model).json()["choices"][0]
            assert decode(choice["token_ids"][-1:]) == end


def test_a_reply_in_the_models_own_markup_is_read(other_dir: Path) -> None:
    with ScriptedEngine(other_dir, lambda _: 'Now:[TOOL_CALLS]add[ARGS]{"a": 1}') as engine:
        choice = ask(engine, model=engine.model, tools=TOOLS).json()["choices"][0]
        message = choice["message"]
        assert message["content"] == "Now:"
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert choice["finish_reason"] == "tool_calls"
        streamed = [line.removeprefix("data: ") for line in lines(engine, tools=TOOLS)]
        pieces = [json.loads(line) for line in streamed if line != "[DONE]"]
        deltas = [piece["choices"][0]["delta"] for piece in pieces if piece["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
        assert "".join(delta.get("content", "") for delta in deltas) == "Now:"


def test_a_model_that_does_not_say_how_turns_end_is_refused(other_dir: Path) -> None:
    (other_dir / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with ScriptedEngine(other_dir, lambda _: "four") as engine:
        reply = ask(engine, model=engine.model)
    assert "name an eos_token in tokenizer_config.json" in reply.text


def test_a_script_is_certain_unless_it_says_otherwise(serve: Serve) -> None:
    replies = iter(
        [
            ScriptedReply("ok"),
            ScriptedReply("ok", logprob=-0.5),
            ScriptedReply("ok", logprob=MISSING_LOGPROB),
        ]
    )
    with serve(lambda request: next(replies)) as engine:
        for expected in (0.0, -0.5, -9999.0):
            content = ask(engine).json()["choices"][0]["logprobs"]["content"]
            assert {entry["logprob"] for entry in content} == {expected}


def test_a_reply_may_be_cut_by_max_tokens_or_by_the_script(serve: Serve) -> None:
    with serve(lambda request: ScriptedReply("look the key up", end=False)) as engine:
        assert ask(engine).json()["choices"][0]["finish_reason"] == "length"
        short = ask(engine, max_tokens=2).json()["choices"][0]
        assert short["finish_reason"] == "length"
        assert len(short["token_ids"]) == 2


def test_a_refusal_keeps_its_status_also_when_streaming(serve: Serve) -> None:
    refusals = [
        Refuse(503, "busy", "ServiceUnavailableError"),
        ScriptedReply(fault=Refuse(429, "slow down", "RateLimitError")),
    ]
    for refusal, status in zip(refusals, (503, 429), strict=True):
        with serve(lambda request, refusal=refusal: refusal) as engine:
            for stream in (False, True):
                reply = ask(engine, stream=stream)
                assert reply.status_code == status
                assert reply.json()["error"]["code"] == status


def test_a_cut_breaks_the_connection_after_its_tokens(serve: Serve) -> None:
    with serve(lambda request: ScriptedReply("look the key up then", fault=Cut(3))) as engine:
        seen: list[str] = []
        with pytest.raises(httpx.RemoteProtocolError):
            seen.extend(lines(engine, return_token_ids=True))
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in seen]
        assert sum(len(choice.get("token_ids", ())) for choice in choices) == 3
        with pytest.raises(httpx.RemoteProtocolError):
            ask(engine)


def test_a_failure_in_mid_stream_is_an_error_event(serve: Serve) -> None:
    with serve(
        lambda request: ScriptedReply("look the key up then", fault=Fail(2, "boom"))
    ) as engine:
        seen = list(lines(engine))
        assert seen[-1] == "data: [DONE]"
        assert json.loads(seen[-2].removeprefix("data: "))["error"]["message"] == "boom"
        assert ask(engine).status_code == 500


def test_a_stall_is_silence_and_then_the_rest(serve: Serve) -> None:
    with serve(
        lambda request: ScriptedReply("look the key", fault=Stall(0.4, after_tokens=1))
    ) as engine:
        times = [time.monotonic() for _ in lines(engine)]
        gaps = [after - before for before, after in pairwise(times)]
        assert max(gaps) >= 0.3
        assert engine.backend.running == 0


def test_a_slow_reply_arrives_token_by_token(serve: Serve) -> None:
    with serve(lambda request: ScriptedReply("look the key up", delay=0.03)) as engine:
        times = [time.monotonic() for line in lines(engine) if line != "data: [DONE]"]
        assert times[-1] - times[0] >= 0.05


def test_a_client_that_leaves_frees_its_slot(serve: Serve) -> None:
    with serve(lambda request: ScriptedReply("look " * 200, delay=0.05)) as engine:
        for _ in zip(lines(engine), range(4), strict=False):
            assert engine.backend.running == 1
        until(lambda: engine.backend.running == 0)


@pytest.mark.parametrize(("mode", "finish"), [("wait", "stop"), ("abort", "abort")])
def test_pause_modes_apply_to_scripts_too(serve: Serve, mode: str, finish: str) -> None:
    with serve(lambda request: ScriptedReply("look the key up", delay=0.3)) as engine:
        chunks = []
        for index, line in enumerate(lines(engine)):
            if line.startswith("data: {"):
                chunks.append(json.loads(line[6:]))
            if index == 2:
                paused = httpx.post(engine.base_url + "/pause", params={"mode": mode}, timeout=20)
                assert paused.status_code == 200
        assert chunks[-1]["choices"][0]["finish_reason"] == finish
        assert httpx.post(engine.base_url + "/resume").status_code == 200


def test_a_script_that_fails_is_an_internal_error(serve: Serve) -> None:
    def script(request: ScriptedRequest) -> str:
        raise KeyError("no such line")

    with serve(script) as engine:
        reply = ask(engine)
        assert reply.status_code == 500
        assert "no such line" in reply.json()["error"]["message"]


def test_it_needs_no_torch() -> None:
    code = (
        "import bridle.engine.scripted, sys;"
        " assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_text_prompt_begins_as_the_tokenizer_lets_a_text_begin(
    tiny_dir: Path, tmp_path: Path
) -> None:
    """A text begins as at vLLM: Llama and Gemma have never seen a text without BOS."""
    shutil.copytree(tiny_dir, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    backend = BackendTokenizer.from_file(str(path))
    beginning = backend.token_to_id("<|im_start|>")
    backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", beginning)]
    )
    backend.save(str(path))
    plain = backend.encode("look up", add_special_tokens=False).ids
    with ScriptedEngine(tmp_path, lambda _: "so", served_model_name="teacher") as engine:

        def prompt_ids(**extra: Any) -> list[list[int]]:
            asked = {"prompt": "look up", "return_token_ids": True, **extra}
            reply = httpx.post(engine.base_url + "/v1/completions", json=asked, timeout=20)
            return [choice["prompt_token_ids"] for choice in reply.json()["choices"]]

        def tokens(**asked: Any) -> list[int]:
            reply = httpx.post(engine.base_url + "/tokenize", json=asked, timeout=20)
            return list(reply.json()["tokens"])

        assert prompt_ids() == [[beginning, *plain]]
        assert prompt_ids(prompt=["look up", "look up"]) == [[beginning, *plain]] * 2
        assert prompt_ids(add_special_tokens=False) == prompt_ids(prompt=plain) == [plain]
        assert tokens(prompt="look up") == [beginning, *plain]
        assert tokens(prompt="look up", add_special_tokens=False) == plain
        chat = ask(engine).json()["prompt_token_ids"]
        assert tokens(messages=[{"role": "user", "content": "hi"}]) == chat
        assert chat.count(beginning) == 2
