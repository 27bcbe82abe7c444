"""gpt-oss is rendered as vLLM renders it.

A test in vLLM's environment (``tests/vllm/test_real_rendering.py``) shows that the ids are vLLM's
own.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bridle.engine.contract import harmony
from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.proxy.continuation.tail import Setting, TailRenderer
from bridle.proxy.wire.canonical import Message, ToolCall
from bridle.recipes.models.tiny_tokenizer import train_tokenizer

pytest.importorskip("openai_harmony")

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
ASKED = {"role": "user", "content": "What is a café?"}
CALLED = {
    "role": "assistant",
    "content": None,
    "reasoning": "I look.",
    "tool_calls": [
        {
            "id": "a",
            "type": "function",
            "function": {"name": "look_up", "arguments": '{"word":"café"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "a house"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("gpt-oss")
    train_tokenizer(directory, ["user assistant what is a house"] * 4, vocab_size=300)
    (directory / "config.json").write_text('{"model_type": "gpt_oss"}')
    return Tokenizer(directory)


def test_a_conversation_is_written_in_harmony(tokenizer: Tokenizer) -> None:
    said = {"role": "assistant", "content": "A house.", "reasoning": "Old thought."}
    system = {"role": "system", "content": "Be brief."}
    text = tokenizer.render(
        [system, ASKED, said, ASKED, CALLED, RESULT], [TOOL], reasoning_effort="high"
    )
    head, _, turns = text.partition("<|end|><|start|>developer<|message|>")
    assert f"Current date: {datetime.now():%Y-%m-%d}" in head
    assert "Reasoning: high" in head
    assert "# Instructions\n\nBe brief." in turns
    assert "type look_up = (_: {\nword?: string,\n}) => any;" in turns
    assert turns.endswith(
        "<|start|>user<|message|>What is a café?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>A house.<|end|>"
        "<|start|>user<|message|>What is a café?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.look_up<|channel|>commentary json<|message|>"
        '{"word":"café"}<|call|>'
        "<|start|>functions.look_up<|channel|>commentary to=assistant<|message|>a house<|end|>"
        "<|start|>assistant"
    )


def test_a_tail_is_what_follows_in_harmony(tokenizer: Tokenizer) -> None:
    (directory := tokenizer.directory / "with_call").mkdir(exist_ok=True)
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(["<|call|>", "<|end|>", "<|return|>", "<|start|>"])
    backend.save(str(directory / "tokenizer.json"))
    for name, value in (
        ("config", {"model_type": "gpt_oss"}),
        ("generation_config", {"eos_token_id": [backend.token_to_id("<|call|>")]}),
    ):
        (directory / f"{name}.json").write_text(json.dumps(value))
    reply = Message("assistant", None, tool_calls=(ToolCall("a", "look_up", "{}"),))
    result = Message("tool", "a house", tool_call_id="a")
    tail = TailRenderer(Tokenizer(directory)).tail(reply, [result], Setting(tools=(TOOL,)))
    assert (tail.end_text, tail.text) == (
        "<|call|>",
        "<|start|>functions.look_up<|channel|>commentary to=assistant<|message|>a house<|end|>"
        "<|start|>assistant",
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "say <|end|>"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ],
)
def test_what_the_library_tokenises_otherwise_than_its_text_is_refused(
    tokenizer: Tokenizer, message: dict[str, Any]
) -> None:
    with pytest.raises(TemplateError, match=r"special token|several parts"):
        tokenizer.render([message])


def test_an_effort_that_harmony_has_not_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="no reasoning effort none"):
        tokenizer.render([ASKED], reasoning_effort="none")


def test_without_the_library_the_template_is_used(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harmony, "available", lambda: False)
    assert "<|channel|>" not in Tokenizer(Path(tokenizer.directory)).render([ASKED])
