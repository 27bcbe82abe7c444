"""Tails of genuine model families, as the proxy renders them, for a judge to render again."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bridle.bench.families import FAMILIES, Family, model_directory
from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.proxy.continuation.probe import Prober
from bridle.proxy.continuation.tail import SeamError, Setting, Shape, TailRenderer
from bridle.proxy.wire.canonical import Message, ToolCall
from bridle.recipes.models.packages import PackageNotFetched

RENDERERS = {
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3-2507": "Qwen/Qwen3-4B-Instruct-2507",
    "qwen3-vl": "Qwen/Qwen3-VL-4B-Instruct",
    "qwen3.5": "Qwen/Qwen3.5-4B",
    "qwen3.6": "Qwen/Qwen3.6-35B-A3B",
    "qwen3.8": "Qwen/Qwen3.8-27B",
    "llama3.2": "meta-llama/Llama-3.2-1B-Instruct",
    "deepseek-v3": "deepseek-ai/DeepSeek-R1",
    "deepseek-v4": "deepseek-ai/DeepSeek-V4-Flash-0731",
    "gemma4": "google/gemma-4-E2B-it",
    "gpt-oss": "openai/gpt-oss-20b",
    "glm4.5": "zai-org/GLM-4.5-Air",
    "glm4.7": "zai-org/GLM-4.7-Flash",
    "nemotron3": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotron3-super": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    "nemotron3-ultra": "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    "nemotron3.5": "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
    "minimax-m2": "MiniMaxAI/MiniMax-M2",
    "hunyuan3": "tencent/Hy3",
    "laguna": "poolside/Laguna-XS.2",
    "laguna-s-2.1": "poolside/Laguna-S-2.1",
}
"""The judge's model for each family of ours.

The template of TRL that is called DeepSeek V3 is the one of R1. llama.cpp's copy of Laguna XS 2.1's
template is older than the one that the judge mirrors, so it is not compared.
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
    if tokenizer.token_id("<|message|>") is not None:
        return f"<|channel|>final<|message|>{SAID}"
    opened = prompt.rstrip().endswith("<think>")
    if tokenizer.token_id("<think>") is None and not opened:
        return SAID
    opening = "" if opened else "<think>\n"
    return f"{opening}Hm.\n</think>\n\n{SAID}"


def _sampled_end(tokenizer: Tokenizer, family: Family, calls: int) -> int:
    """Return the id by which the family's policy ends a reply."""
    end = family.call_end if calls else family.text_end
    end_id = tokenizer.token_id(end or family.eos[0])
    assert end_id is not None
    return end_id


def written(messages: Iterable[Message]) -> list[dict[str, Any]]:
    return [message.to_chat() for message in messages]


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
    head = written((SYSTEM, ASKED))
    for calls, ended in product((0, 1, 2), (True, False)):
        reply = _reply(calls)
        for turn, messages in _turns(reply).items():
            shape = prober.proven(reply, messages, setting)
            try:
                text = tokenizer.render(head, tools=list(tools))
                tail = (
                    tails.tail_of_whole((SYSTEM, ASKED), reply, messages, setting)
                    if shape is None
                    else tails.tail(reply, messages, setting, shape)
                )
            except (TemplateError, SeamError):
                continue
            # Gemma 4 writes the text of a reply with calls behind their results.
            said = replace(reply, content=None) if shape is Shape.CALLS else reply
            whole = tokenizer.render([*head, *written((said, *messages))], tools=list(tools))
            assert whole.endswith(tail.end_text + tail.text), "the genuine template writes another"
            prompt, ids = tokenizer.encode(text), tail.token_ids.tolist()
            sampled = tokenizer.encode(_sampled(tokenizer, text))
            if tail.end_id is None and not ended:
                continue  # The next turn's first token ends a reply, and nothing shows which.
            end, rest = (ids[:1], ids[1:]) if tail.end_id is None else ([tail.end_id], ids)
            if ended and tail.end_id is not None:
                end = [_sampled_end(tokenizer, FAMILIES[name], calls)]
            yield {
                "name": f"{name}-{calls}_calls-{turn}-{'ended' if ended else 'cut'}",
                "model": RENDERERS[name],
                "directory": str(directory),
                "tool": TOOL,
                "prompt": prompt,
                "sampled": sampled + (end if ended else []),
                "messages": written(messages),
                "expected": [*prompt, *sampled, *end, *rest],
            }


def write(file: Path, material: Path) -> None:
    """Write the tails of every family that both know, as JSON.

    The vocabulary that the judge of gpt-oss would download, and checks by its digest, stands
    beside them.
    """
    file.write_text(json.dumps([case for name in RENDERERS for case in cases(name, material)]))
    with suppress(PackageNotFetched):
        tokenizer = Tokenizer(model_directory("gpt-oss", material))
        pieces = tokenizer.vocabulary()[: tokenizer.token_id("<|startoftext|>")]
        lines = (f"{b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces))
        file.with_name("o200k_base.tiktoken").write_text("".join(lines))
