"""The words with which engines and providers end a reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bridle.proxy.wire.canonical import FinishReason

FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "repetition": "stop",
}
_ODD_STOPS: Final = (
    "complete completed end end_turn eos eos_token finish_reason_stop finished normal "
    "stop_sequence stop_token word"
)
_ODD_LENGTHS: Final = (
    "finish_reason_max_tokens limit max_length max_new_tokens max_output_tokens max_tokens "
    "model_context_window_exceeded model_length token_limit"
)
_ODD_FILTERS: Final = (
    "blocklist content_filtered finish_reason_safety guardrail_intervened image_safety language "
    "prohibited_content recitation refusal safety sensitive spii"
)
_ODD_FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    **dict.fromkeys(_ODD_STOPS.split(), "stop"),
    **dict.fromkeys(_ODD_LENGTHS.split(), "length"),
    **dict.fromkeys(_ODD_FILTERS.split(), "content_filter"),
    "tool_call": "tool_calls",
    "tool_use": "tool_calls",
}
"""The finish reasons of TGI, llama.cpp, Gemini, Anthropic, Mistral, Bedrock and Zhipu, in lower
case."""


def odd_reason(word: str) -> FinishReason | None:
    """Return the reason that a word of another provider stands for, or ``None``."""
    plain = word.lower()
    return FINISH_REASONS.get(plain) or _ODD_FINISH_REASONS.get(plain)
