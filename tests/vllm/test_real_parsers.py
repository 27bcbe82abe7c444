"""vLLM's parsers, as chosen for genuine templates and tokenizers, on the families' own markup.

Each is built in vLLM's environment (``parse_samples.py``).
"""

from __future__ import annotations

import json
import subprocess
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.serve.markup import READ, reader
from bridle.engine.vllm.flags import INSIDE
from bridle.engine.vllm.installation import find_installation
from bridle.engine.vllm.parsers import (
    REASONING_PARSERS,
    THINK_PARSERS,
    TOOL_PARSERS,
    choose_parsers,
    own_parser,
)

families = pytest.importorskip("bridle.bench.families")
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

MATERIAL = families.cache_directory()
"""The user's own cache, read before the tests hide it: what was fetched is kept between runs."""
PLUGINS = (INSIDE / "bridle_thinking.py", INSIDE / "bridle_calls.py")
SAMPLES = Path(__file__).with_name("parse_samples.py")
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("look_up", {"city": "Ghent & <b>", "days": 3}),
    ("count_up", {"city": "Bonn"}),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks something up.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name, _ in CALLS
]
THOUGHT = "I should look."
THINKING: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": {"thinking": True},
    "laguna": {"enable_thinking": True},
    "gemma4": {"enable_thinking": True},
    "hunyuan3": {"reasoning_effort": "high"},
    "cohere-command-r7b": {"enable_thinking": True},
}
"""Template arguments that turn reasoning on where it is off."""


def deepseek_v3() -> str:
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in CALLS
    )
    return f"{THOUGHT}</think><｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def kimi() -> str:
    calls = "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
        for at, (name, arguments) in enumerate(CALLS)
    )
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


def harmony() -> str:
    name, arguments = CALLS[0]
    return (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>"
    )


def granite() -> str:
    calls = [{"name": name, "arguments": arguments} for name, arguments in CALLS]
    return f"<|tool_call|>{json.dumps(calls)}"


def nemotron_v2() -> str:
    calls = [{"name": name, "arguments": arguments} for name, arguments in CALLS]
    return f"{THOUGHT}\n</think>\n\n<TOOLCALL>{json.dumps(calls)}</TOOLCALL>"


def gigachat3() -> str:
    name, arguments = CALLS[0]
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<|message_sep|>\n\nfunction call<|role_sep|>\n{call}"


def cohere() -> str:
    calls = [
        {"tool_call_id": str(at), "tool_name": name, "parameters": arguments}
        for at, (name, arguments) in enumerate(CALLS)
    ]
    return (
        f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>"
        f"<|START_ACTION|>{json.dumps(calls, indent=4)}<|END_ACTION|>"
    )


WRITTEN = {
    "deepseek-v3": deepseek_v3,
    "deepseek-r1": deepseek_v3,
    "deepseek-r1-distill": deepseek_v3,
    "kimi-k2": kimi,
    "kimi-k2-thinking": lambda: f"{THOUGHT}</think>{kimi()}",
    "gpt-oss": harmony,
    "granite3.3": granite,
    "nemotron-nano-v2": nemotron_v2,
    "gigachat3": gigachat3,
    "cohere-command-r7b": cohere,
    "qwq": lambda: "".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>\n"
        for name, arguments in CALLS
    ),
}
"""Replies of families whose templates do not render one with calls as the model samples it."""

REASONING = {
    *("deepseek-r1", "deepseek-r1-distill", "deepseek-v3", "deepseek-v3.2", "gemma4", "glm4.5"),
    *("glm4.7", "gpt-oss", "kimi-k2-thinking", "laguna", "lfm2.5", "minicpm5", "minimax-m2"),
    *("nemotron3", "qwen3", "qwen3.5", "seed-oss", "step3.5"),
    *("cohere-command-r7b", "hunyuan3", "nemotron-nano-v2"),
}
"""Families whose sample reasons."""
PLAIN = {
    *("apertus", "deepseek-v3.1", "devstral", "functionary3.1", "llama3.2"),
    *("mistral-nemo", "mistral-small-3.2", "qwq"),
    *("granite3.3", "granite4", "kimi-k2"),
    *(
        "gigachat3",
        "lfm2",
        "llama3.1",
        "llama3.3",
        "ministral3",
        "qwen2.5",
        "qwen3-2507",
        "qwen3-coder",
    ),
}
ONE_CALL = {"gigachat3", "gpt-oss", "llama3.1", "llama3.2", "llama3.3"}
"""Families that call one tool at a time."""


def sample(name: str) -> dict[str, Any]:
    """The case of one family for ``parse_samples.py``."""
    directory = families.model_directory(name, MATERIAL)
    tokenizer, chosen = Tokenizer(directory), choose_parsers(directory)
    arguments = THINKING.get(name, {})
    asked = [{"role": "user", "content": "Where?"}]
    try:
        prompt = tokenizer.render(asked, TOOLS, **arguments)
    except TemplateError:
        prompt = "<think>\n"
    reply = WRITTEN[name]() if name in WRITTEN else rendered(tokenizer, name, prompt, arguments)
    return {
        "directory": str(directory),
        "tool": chosen.tool,
        "reasoning": chosen.reasoning,
        "prompt": prompt,
        "reply": reply,
        "arguments": arguments,
    }


def rendered(tokenizer: Tokenizer, name: str, prompt: str, arguments: dict[str, Any]) -> str:
    """Return the template's text behind ``prompt`` for a reply that reasons and calls."""
    calls = [
        {
            "id": f"abcdefgh{at}",
            "type": "function",
            "function": {"name": called, "arguments": json.dumps(given)},
        }
        for at, (called, given) in enumerate(CALLS[:1] if name in ONE_CALL else CALLS)
    ]
    said = {"role": "assistant", "content": "", "reasoning": THOUGHT, "tool_calls": calls}
    asked = {"role": "user", "content": "Where?"}
    whole = tokenizer.render([asked, said], TOOLS, add_generation_prompt=False, **arguments)
    pairs = zip(prompt, whole, strict=False)
    reply = whole[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
    for end in map(tokenizer.decode, ([each] for each in tokenizer.eos_token_ids)):
        reply = reply.partition(end)[0]
    return reply


@cache
def outcomes() -> dict[str, Any]:
    """Return vLLM's findings in every family's sample, and the parsers that it knows."""
    cases = {name: sample(name) for name in sorted(REASONING | PLAIN)}
    python = find_installation(None).python
    run = subprocess.run(
        [str(python), str(SAMPLES), *map(str, PLUGINS)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(json.loads(run.stdout))


@pytest.mark.parametrize("name", sorted(REASONING | PLAIN))
def test_the_chosen_parsers_read_the_familys_own_markup(name: str) -> None:
    found = outcomes()["found"][name]
    assert "error" not in found, found
    wanted = CALLS[:1] if name in ONE_CALL else CALLS
    for kind in ("whole", "streamed"):
        calls = [(called, json.loads(arguments)) for called, arguments in found[kind]["calls"]]
        assert calls == wanted, kind
        assert (found[kind]["reasoning"] or "").strip() == (THOUGHT if name in REASONING else "")
        assert not (found[kind]["content"] or "").strip(), kind


def test_the_tables_name_vllms_parsers_and_leave_none_out() -> None:
    known = outcomes()["registered"]
    ours = {tool for tool in TOOL_PARSERS.values() if tool.startswith(own_parser(""))}
    assert set(TOOL_PARSERS.values()) - ours <= set(known["tool"])
    reasoning = {*REASONING_PARSERS.values(), *THINK_PARSERS.values(), "qwen3"}
    assert reasoning <= set(known["reasoning"])
    # The markup of these is that of a parser in the table, or of no template's own.
    same = {
        *("glm47", "ling3"),  # glm45
        *("qwen3_xml", "mimo", "step3p5"),  # qwen3_coder
        *("granite4", "qwen3_json", "ernie45"),  # hermes
        "llama4_json",  # llama3_json
        "jamba",  # hunyuan_a13b
        "cohere_command4",  # cohere_command3
        "hf",  # a response template in the tokenizer's files
    }
    assert set(known["tool"]) - set(TOOL_PARSERS.values()) == same


@pytest.mark.parametrize("name", ["glm4.5", "qwen3.5", "deepseek-v3.2", "seed-oss"])
def test_our_own_engines_read_the_same_calls(name: str) -> None:
    from bridle.engine.contract.markup import tool_markup

    case = sample(name)
    markup = tool_markup(Tokenizer(case["directory"]))
    assert markup is not None
    assert markup.name in READ
    parser = reader(markup.name, TOOLS)
    deltas = [delta for character in case["reply"] for delta in parser.push(character)]
    names = [delta.name for delta in deltas if hasattr(delta, "name")]
    assert names == [called for called, _ in CALLS]
