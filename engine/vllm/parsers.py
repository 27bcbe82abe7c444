"""The choice of vLLM's parsers for replies, by the markup that a model's chat template writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bridle.engine.contract.markup import THINK, prompt_end, reasoning_markup, tool_markup
from bridle.engine.contract.tokenizer import Tokenizer

AUTO: Final = "auto"
OWN_THINKING: Final = "bridle_thinking"
"""The parser of ``<think>`` at the beginning of replies (``inside/bridle_thinking.py``)."""
OWN_OPEN_THINKING: Final = "bridle_thinking_open"
"""The parser of replies whose prompt has opened ``<think>`` (the same file)."""


OWN_CALLS: Final = "bridle_calls"
"""The module of our own tool parsers (``inside/bridle_calls.py``)."""


def own_parser(markup: str) -> str:
    """Return the name of our own parser of a markup for which vLLM has none or a wrong one."""
    return f"bridle_{markup}"


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names for ``--tool-call-parser`` and ``--reasoning-parser``."""

    tool: str | None
    """The tool parser; ``None`` if the template shows no tool calls."""
    reasoning: str | None
    """The reasoning parser; ``None`` if replies begin with the answer."""


def choose_parsers(model_dir: Path) -> Parsers:
    tokenizer = Tokenizer(model_dir)
    markup = tool_markup(tokenizer)
    written = markup.name if markup else None
    tool = TOOL_PARSERS.get(written) if written else None
    if tool == "llama3_json" and tokenizer.token_id("<|python_tag|>") is None:
        # vLLM's parser does not start without that token.
        tool = own_parser("llama_json")
    if tool == "mistral" and _misread(tokenizer):
        tool = own_parser("mistral")
    return Parsers(tool, _reasoning_parser(tokenizer, written))


def _misread(tokenizer: Tokenizer) -> bool:
    """Return whether vLLM's Mistral parser misreads the model's calls.

    It takes an id before the arguments for a part of the name, and an array of calls for a name if
    ``[ARGS]`` is a token.
    """
    source = tokenizer.tools_template_source
    return "[CALL_ID]" in source or (
        "[ARGS]" not in source and tokenizer.token_id("[ARGS]") is not None
    )


def parsers_for(model_dir: Path, tool: str | None, reasoning: str | None) -> Parsers:
    """Return the parsers named ``tool`` and ``reasoning``.

    ``auto`` selects the one for the model's template.
    """
    if AUTO not in (tool, reasoning):
        return Parsers(tool, reasoning)
    chosen = choose_parsers(model_dir)
    return Parsers(
        chosen.tool if tool == AUTO else tool,
        chosen.reasoning if reasoning == AUTO else reasoning,
    )


TOOL_PARSERS: Final = {
    "harmony": "openai",
    "deepseek_v41": "deepseek_v41",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "step3": "step3",
    "mistral": "mistral",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "k2_horizon": "k2_horizon",
    "gemma4": "gemma4",
    "functiongemma": "functiongemma",
    "lfm2": "lfm2",
    "apertus": "apertus",
    "cohere": "cohere_command3",
    "inkling": "inkling",
    "internlm": "internlm",
    "plamo3": "plamo3",
    "muse_glimmer": "muse_glimmer",
    "minimax_m3": "minimax_m3",
    "minimax_m2": "minimax_m2",
    "longcat": "longcat",
    "dots": "dots",
    "llama4_pythonic": "llama4_pythonic",
    "gigachat3": "gigachat3",
    "granite": "granite",
    "granite_array": "granite",
    "nemotron_v2": own_parser("nemotron_v2"),
    "functionary": own_parser("functionary"),
    "granite_20b": "granite-20b-fc",
    "olmo3": "olmo3",
    "phi4_mini": "phi4_mini_json",
    "minicpm5": "minicpm5",
    "seed_oss": "seed_oss",
    "hy_v3": "hy_v3",
    "hy_v4": "hy_v4",
    "hunyuan_a13b": "hunyuan_a13b",
    "poolside": "poolside_v1",
    "glm": "glm45",
    "qwen_xml": "qwen3_coder",
    "hermes": "hermes",
    "llama_json": "llama3_json",
    "pythonic": "pythonic",
    "xlam": "xlam",
}
"""The tool parser for each markup, vLLM's own or one of ours. The tests check that the table is
complete for vLLM 0.32."""

REASONING_PARSERS: Final = {
    "harmony": "openai_gptoss",
    "gemma4": "gemma4",
    "seed_oss": "seed_oss",
    "minimax_m3": "minimax_m3",
    "k2_horizon": "k2_horizon",
    "kimi_k3": "kimi_k3",
    "cohere": "cohere_command3",
    "inkling": "inkling",
    "plamo3": "plamo3",
    "muse_glimmer": "muse_glimmer",
    "mistral": "mistral",
    "granite": "granite",
}
"""vLLM's reasoning parser for each markup but ``<think>``."""

THINK_PARSERS: Final = {
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2",
    "poolside": "poolside_v1",
    "glm": "glm45",
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v41",
    "step3": "step3",
    "hunyuan_a13b": "hunyuan_a13b",
    "hy_v3": "hy_v3",
    "hy_v4": "hy_v4",
}
"""vLLM's parser of ``<think>`` for templates that share it with a markup of tool calls: it knows
which of the family's template arguments turn reasoning on."""


def _reasoning_parser(tokenizer: Tokenizer, tools: str | None) -> str | None:
    markup = reasoning_markup(tokenizer)
    if markup is None:
        return None
    if markup.name in REASONING_PARSERS:
        return REASONING_PARSERS[markup.name]
    opened = prompt_end(tokenizer).rstrip().endswith(markup.opening)
    if markup == THINK and tokenizer.token_id(THINK.opening) is None:
        # vLLM's own parsers find the tags by their token ids.
        return OWN_OPEN_THINKING if opened else OWN_THINKING
    if tools in THINK_PARSERS:
        return THINK_PARSERS[tools]
    if markup != THINK:
        return None
    if opened or "enable_thinking" in tokenizer.chat_template_source:
        # Reads what comes before </think> as reasoning, also without an opening tag.
        return "qwen3"
    return OWN_THINKING
