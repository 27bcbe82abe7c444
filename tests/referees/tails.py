"""Tails of genuine model families, as the proxy renders them, for a judge to render again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from bridle.bench.families import model_directory
from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.proxy.continuation.probe import Prober
from bridle.proxy.continuation.tail import Setting, TailRenderer
from bridle.proxy.wire.canonical import Message, ToolCall
from bridle.recipes.models.packages import PackageNotFetched

RENDERERS = {
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3-2507": "Qwen/Qwen3-4B-Instruct-2507",
    "qwen3.5": "Qwen/Qwen3.5-4B",
    "glm4.5": "zai-org/GLM-4.5-Air",
    "glm4.7": "zai-org/GLM-4.7-Flash",
    "minimax-m2": "MiniMaxAI/MiniMax-M2",
    "nemotron3": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "llama3.2": "meta-llama/Llama-3.2-1B-Instruct",
    "hunyuan3": "tencent/Hy3",
}
"""The judge's model for each family of ours.

Families are left out whose copy of the template or tokenizer is not the one that the judge knows:
DeepSeek and Kimi K2 (templates), Gemma 4 and Laguna (special tokens), gpt-oss (a download).
"""
SAID = "Let me see."
SYSTEM = Message("system", "You help.")
ASKED = Message("user", "What is the weather in Oslo and in Rome?")
TOOL = {
    "name": "weather",
    "description": "Return the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def _reply(calls: int) -> Message:
    called = tuple(
        ToolCall(f"functions.weather:{index}", "weather", json.dumps({"city": city}))
        for index, city in enumerate(("Oslo", "Rome")[:calls])
    )
    return Message("assistant", SAID, reasoning="The weather.", tool_calls=called)


def _sampled(tokenizer: Tokenizer, prompt: str) -> str:
    """Return the text of a reply, which closes the reasoning that it or its prompt opens."""
    if tokenizer.token_id("<think>") is None:
        return SAID
    opening = "" if prompt.rstrip().endswith("<think>") else "<think>\n"
    return f"{opening}Hm.\n</think>\n\n{SAID}"


def _turns(reply: Message) -> dict[str, tuple[Message, ...]]:
    """Return the next messages after a reply, by a name."""
    thanks = Message("user", "Thanks.\nAnd in Paris?")
    if not reply.tool_calls:
        return {"user": (thanks,)}
    results = tuple(
        Message("tool", f"Sunny, {index} °C", name=call.name, tool_call_id=call.id)
        for index, call in enumerate(reply.tool_calls)
    )
    return {"results": results, "results_user": (*results, thanks)}


def cases(name: str, material: Path) -> Iterator[dict[str, Any]]:
    """Yield the tails of a family, each with the ids before it; none if it cannot be fetched."""
    try:
        directory = model_directory(name, material)
    except PackageNotFetched:
        return
    tokenizer = Tokenizer(directory)
    tails = TailRenderer(tokenizer)
    prober = Prober(tokenizer, tails)
    tools = ({"type": "function", "function": TOOL},)
    setting = Setting((SYSTEM,), tools)
    head = [message.to_chat() for message in (SYSTEM, ASKED)]
    for calls, ended in product((0, 1, 2), (True, False)):
        reply = _reply(calls)
        for turn, messages in _turns(reply).items():
            shape = prober.proven(reply, messages, setting)
            if shape is None:
                continue
            try:
                text = tokenizer.render(head, tools=list(tools))
                tail = tails.tail(reply, messages, setting, shape)
            except TemplateError:
                continue
            prompt, ids = tokenizer.encode(text), tail.token_ids.tolist()
            sampled = tokenizer.encode(_sampled(tokenizer, text))
            if tail.end_id is None and not ended:
                continue  # The next turn's first token ends a reply, and nothing shows which.
            end = ids[:1] if tail.end_id is None else [tail.end_id]
            rest = ids[1:] if tail.end_id is None else ids
            yield {
                "name": f"{name}-{calls}_calls-{turn}-{'ended' if ended else 'cut'}",
                "model": RENDERERS[name],
                "directory": str(directory),
                "tool": TOOL,
                "prompt": prompt,
                "sampled": sampled + (end if ended else []),
                "messages": [message.to_chat() for message in messages],
                "expected": [*prompt, *sampled, *end, *rest],
            }


def write(file: Path, material: Path) -> None:
    """Write the tails of every family that both know, as JSON."""
    file.write_text(json.dumps([case for name in RENDERERS for case in cases(name, material)]))
