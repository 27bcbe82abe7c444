"""A context overflow: how upstreams report it, and each provider's own sentence for it.

Harnesses match a provider's exact words to decide between compacting, asking for fewer tokens and
giving up. So an overflow is recognised in the words of every upstream (:data:`SENTENCES`, one line
an upstream), its numbers are read, and they are written into the provider's sentence.
"""

from __future__ import annotations

import re
from typing import Final

from bridle.proxy.wire.canonical import ApiError, Overflow

CODES: Final = frozenset(
    {
        "context_length_exceeded",  # OpenAI and most providers like it
        "context_window_exceeded",
        "contextwindowexceedederror",  # LiteLLM
        "exceed_context_size_error",  # llama.cpp
        "model_context_window_exceeded",  # Anthropic
        "model_max_prompt_tokens_exceeded",  # GitHub Models
        "prompt_too_long",
    }
)
"""Codes and types that upstreams give an overflow, in lower case."""

_P, _O, _L = r"(?P<prompt>\d{1,12})", r"(?P<output>\d{1,12})", r"(?P<limit>\d{1,12})"
_OPENAI = rf"maximum context length is {_L} tokens"
SENTENCES: Final = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        # OpenAI, DeepSeek, older vLLM; OpenRouter says "(P of text input, O in the output)".
        rf"{_OPENAI}\. however, (?:your messages|you requested).{{0,40}}? resulted in {_P} tokens",
        rf"{_OPENAI}\. however, you requested (?:about )?\d+ tokens \({_P} (?:tokens )?(?:in the "
        rf"messages|of text input)[^)]{{0,80}}?{_O} (?:tokens )?in the (?:completion|output)",
        # vLLM
        rf"{_OPENAI}\. however, your request has {_P} input tokens",
        rf"{_OPENAI}\. however, you requested {_O} output tokens and your prompt contains "
        rf"(?:at least )?{_P} (?:input )?tokens",
        rf"{_OPENAI}\. however, your prompt contains (?:at least )?{_P} (?:input )?tokens",
        rf"is too large: {_O}\. this model's {_OPENAI} and your request has {_P} input tokens",
        rf"prompt \(length {_P}\) is longer than the maximum (?:model|sequence) length of {_L}",
        rf"input length \({_P}\) exceeds (?:the )?model's maximum \w+ length \({_L}\)",
        rf"{_P} (?:input )?tokens.{{0,80}}?max_model_len\D{{0,20}}{_L}",
        # SGLang
        rf"the input \({_P} tokens\) is longer than the model's context length \({_L} tokens\)",
        rf"maximum context length of {_L} tokens\. you requested a total of \d+ tokens: {_P} "
        rf"tokens from the input messages and {_O} tokens for the completion",
        # llama.cpp
        rf"request \({_P} tokens\) exceeds the available context size \({_L} tokens\)",
        r"exceeds? the available context size",
        r"context size has been exceeded",
        # Gemini and Vertex AI
        rf"input token count \({_P}\) exceeds the maximum number of tokens allowed \({_L}\)",
        rf"input token count exceeds the maximum number of tokens allowed \({_L}\)",
        rf"input token count is {_P} but (?:the )?model only supports up to {_L}",
        # Text Generation Inference, Together
        rf"tokens \+ `?max_new_tokens`? must be <= {_L}\. given: {_P} `?inputs`? tokens and {_O}",
        rf"`?inputs`? must have less than {_L} tokens\. given: {_P}",
        # Anthropic, Fireworks
        rf"prompt is too long: {_P} tokens > {_L} maximum",
        rf"exceed context limit: {_P} \+ {_O} > {_L}",
        rf"prompt is too long: {_P}, model maximum context length: {_L}",
        # Mistral
        rf"prompt contains {_P} tokens.{{0,60}}?too large for model with {_L} maximum context",
        # xAI
        rf"maximum prompt length is {_L} but the request contains {_P} tokens",
        # Kimi, GitHub Models, Cohere, Cerebras
        rf"exceeded model token limit: {_L}(?: \(requested: {_P}\))?",
        rf"prompt token count of {_P} exceeds the limit of {_L}",
        rf"tokens in the prompt cannot exceed {_L} - received {_P}",
        rf"current length is {_P} while limit is {_L}",
        # Qwen at DashScope
        rf"range of input length should be \[\d+, {_L}\]",
        # Bedrock, MiniMax, Zhipu, Ollama, LM Studio
        r"input is too long for requested model",
        r"context window exceeds limit",
        r"prompt exceeds max(?:imum)? length",
        r"input length exceeds the (?:maximum )?context length",
        r"greater than the context length",
        r"reached context length of (?P<limit>\d{1,12}) tokens",
        # What is left of OpenAI's and vLLM's sentences, and whoever writes alike.
        rf"maximum (?:context|model|sequence) length(?: is| of)? \(?{_L}",
        r"maximum (?:context|model) length",
        r"context[ _](?:length|window)",
    )
)
"""Patterns of the sentences with which upstreams report an overflow, the exact ones before the
loose ones."""
_LONGEST: Final = 4000
"""Maximum characters of a message that are searched."""
_LOOSE: Final = SENTENCES[-1]
"""A pattern that is too loose for an error that is not a refusal of the request."""


def read(message: str) -> Overflow:
    """Return the numbers in an upstream's ``message``, or none for an unknown sentence."""
    for sentence in SENTENCES:
        if (found := sentence.search(message, 0, _LONGEST)) is not None:
            numbers = {name: int(text) for name, text in found.groupdict().items() if text}
            return Overflow(**numbers)
    return Overflow()


def is_overflow(message: str, *, refusal: bool = True) -> bool:
    """Return whether ``message`` reports a context overflow.

    ``refusal`` means that it refuses the request, and is no failure of the upstream.
    """
    return any(
        sentence.search(message, 0, _LONGEST) is not None
        for sentence in SENTENCES
        if refusal or sentence is not _LOOSE
    )


def numbers_of(error: ApiError) -> Overflow:
    """Return the numbers that an overflow came with; those in its message fill the gaps."""
    found, given = read(error.message), error.overflow or Overflow()
    return Overflow(
        *(found if mine is None else mine for mine, found in zip(given, found, strict=True))
    )


def openai(error: ApiError) -> str:
    found, message = numbers_of(error), error.message
    if found.limit is None:
        return f"Your input exceeds the context window of this model. {message}"
    limit = f"This model's maximum context length is {found.limit} tokens. However, "
    if found.prompt is None:
        return limit + "your input and the requested output are longer. Please reduce their length."
    if found.output is not None and found.prompt <= found.limit:
        return limit + (
            f"you requested {found.prompt + found.output} tokens ({found.prompt} in the messages, "
            f"{found.output} in the completion). Please reduce the length of the messages or "
            "completion."
        )
    return limit + (
        f"your messages resulted in {found.prompt} tokens. "
        "Please reduce the length of the messages."
    )


def anthropic(error: ApiError) -> str:
    found, message = numbers_of(error), error.message
    if found.prompt is None or found.limit is None:
        return f"prompt is too long: {message}"
    if found.output is not None and found.prompt <= found.limit:
        return (
            f"input length and `max_tokens` exceed context limit: {found.prompt} + "
            f"{found.output} > {found.limit}, decrease input length or `max_tokens` and try again"
        )
    return f"prompt is too long: {found.prompt} tokens > {found.limit} maximum"


def google(error: ApiError) -> str:
    found, message = numbers_of(error), error.message
    if found.prompt is None or found.limit is None:
        return f"The input token count exceeds the maximum number of tokens allowed. {message}"
    used = found.prompt + (found.output or 0) if found.prompt <= found.limit else found.prompt
    return (
        f"The input token count ({used}) exceeds the maximum number of tokens allowed "
        f"({found.limit})."
    )
