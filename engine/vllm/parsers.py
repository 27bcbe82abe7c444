"""Which of vLLM's parsers read what a model writes: by its chat template, then by its family."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bridle.engine.contract.tokenizer import TemplateError, Tokenizer

OWN_THINKING: Final = "bridle_thinking"
"""The reasoning parser in ``inside/bridle_thinking.py``."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names for ``--tool-call-parser`` and ``--reasoning-parser``."""

    tool: str | None
    """``None``: the template shows no tool calls that a parser of vLLM's reads."""
    reasoning: str | None
    """``None``: replies begin with the answer."""


def choose_parsers(model_dir: Path) -> Parsers:
    """The parsers for the model in ``model_dir``."""
    tokenizer = Tokenizer(model_dir)
    try:
        template = tokenizer.chat_template_source
    except TemplateError:
        return Parsers(tool=None, reasoning=None)
    family = _family(model_dir)
    return Parsers(
        tool=_tool_parser(tokenizer.tools_template_source, family),
        reasoning=_reasoning_parser(template, family, tokenizer),
    )


# Markup in the template decides before the family does: fine-tunes keep the family's name and
# change the template.
_TOOL_MARKUP: Final = (
    ("<|channel|>", "openai"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<|python_tag|>", "llama3_json"),
    ("<arg_key>", "glm45"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<tool_call>", "hermes"),
)
_TOOL_FAMILIES: Final = {
    "llama": "llama3_json",
    "llama4": "llama4_pythonic",
    "mistral": "mistral",
    "gpt_oss": "openai",
    "granite": "granite",
    "qwen2": "hermes",
    "qwen3": "hermes",
}


def _tool_parser(template: str, family: str) -> str | None:
    if "tools" not in template:
        return None
    for markup, parser in _TOOL_MARKUP:
        if markup in template:
            return parser
    return _TOOL_FAMILIES.get(family)


_REASONING_FAMILIES: Final = {
    "gpt_oss": "openai_gptoss",
    "deepseek_v3": "deepseek_r1",
    "glm4_moe": "glm45",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2",
}


def _reasoning_parser(template: str, family: str, tokenizer: Tokenizer) -> str | None:
    if family in _REASONING_FAMILIES:
        return _REASONING_FAMILIES[family]
    if "<think>" not in template:
        return None
    if "enable_thinking" in template or _opens_thinking(tokenizer):
        # Reads what comes before </think> as reasoning, also without an opening tag.
        return "qwen3"
    return OWN_THINKING


def _opens_thinking(tokenizer: Tokenizer) -> bool:
    """Whether the template itself writes ``<think>`` where the reply is to begin."""
    try:
        prompt = tokenizer.render([{"role": "user", "content": "x"}])
    except TemplateError:
        return False
    return prompt.rstrip().endswith("<think>")


def _family(model_dir: Path) -> str:
    path = model_dir / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return str(config.get("model_type", ""))
