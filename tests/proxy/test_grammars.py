"""Replies that an engine's grammar constrains, in whole, after the reasoning, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.scripted import ScriptedCall, ScriptedReply
from bridle.proxy.engines.weights import Constrained, EngineSampling
from bridle.reconstruct.samples.rules import DEFAULT_RULES, trainable
from bridle.reconstruct.session import LoadedSession

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
THOUGHT = "One two three."
MODEL = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}


@pytest.mark.parametrize(
    ("structured", "constrained"),
    [
        ({"reasoning_parser": "qwen3", "enable_in_reasoning": False}, "answer"),
        ({"reasoning_parser": "qwen3", "enable_in_reasoning": True}, "reply"),
        ({"reasoning_parser": "qwen3"}, "reply"),
        ({"reasoning_parser": "", "enable_in_reasoning": False}, "reply"),
        (None, "reply"),
    ],
)
def test_vllm_reports_what_its_grammars_constrain(structured: Any, constrained: str) -> None:
    assert EngineSampling.reported(MODEL, structured) == EngineSampling(
        "processed", True, constrained
    )


def asked(bench: Any, *, stream: bool) -> Any:
    """Ask for a tool call with ``tool_choice: required``; the recorded call."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Add."}], "stream": stream}
    body |= {"tools": [TOOL], "tool_choice": "required"}
    httpx.post(f"{bench.url}/v1/chat/completions", json=body, timeout=30).raise_for_status()
    return bench.call()


def trained(bench: Any, call: Any) -> list[int]:
    """The ids of the call that are trained."""
    session = LoadedSession.load(bench.reader, call.session_id)
    mask = trainable(call, session, DEFAULT_RULES)[0].mask()
    (sampled,) = bench.reader.sampled(call.id)
    return [int(one) for one in sampled.token_ids[mask]]


@pytest.fixture
def behind(
    stage: Any, start_proxy: Any, model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """A proxy before an engine whose grammars constrain this part of a reply."""

    def start(constrained: Constrained | None = None) -> Any:
        if constrained is not None:
            report = EngineSampling("processed", True, constrained)
            monkeypatch.setattr(EngineSampling, "reported", lambda *_: report)
        stage.play = lambda _: ScriptedReply(
            reasoning=THOUGHT, tool_calls=(ScriptedCall("add", {"a": 1}),)
        )
        return start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)

    return start


def test_a_choice_of_tools_that_constrains_nothing_masks_nothing(behind: Any) -> None:
    bench = behind()
    call = asked(bench, stream=False)
    assert call.sampler.grammar == ""
    assert not call.constrained
    (sampled,) = bench.reader.sampled(call.id)
    assert trained(bench, call) == sampled.token_ids.tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_the_reasoning_before_a_grammar_is_trained(
    behind: Any, model_dir: Any, stream: bool
) -> None:
    bench = behind("answer")
    call = asked(bench, stream=stream)
    assert (call.sampler.grammar, call.constrained) == ("tool_choice", True)
    text = Tokenizer(model_dir).decode(trained(bench, call))
    assert text.endswith(THOUGHT)
    assert "add" not in text


def test_a_reply_that_a_grammar_constrains_from_its_beginning_is_masked(behind: Any) -> None:
    bench = behind("reply")
    call = asked(bench, stream=False)
    assert call.constrained
    assert trained(bench, call) == []
