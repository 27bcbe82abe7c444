"""A context overflow in each provider's own sentence.

Harnesses match a provider's exact words to decide between compacting, asking for fewer tokens and
giving up. So the numbers are read out of the engine's message and written into the provider's
sentence.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LIMIT = re.compile(
    r"maximum (?:context|model|sequence) length(?: is| of)? \(?(\d+)|> (\d+) maximum"
    r"|max_model_len\D*(\d+)",
    re.IGNORECASE,
)
_PROMPT = re.compile(
    r"(?<!bound for )\b(\d+) input tokens|(\d+) (?:tokens )?in the messages"
    r"|resulted in (\d+) tokens|prompt \(length (\d+)\)|input length \((\d+)\)"
    r"|prompt is too long: (\d+)|prompt contains(?: at least)? (\d+)(?! characters|\d)",
    re.IGNORECASE,
)
_OUTPUT = re.compile(
    r"(\d+) (?:tokens )?in the completion|requested (\d+) output tokens|is too large: (\d+)",
    re.IGNORECASE,
)


class Overflow(NamedTuple):
    """The numbers of an overflow; each is ``None`` where the message does not have it."""

    prompt: int | None
    output: int | None
    """Tokens that the client asked for."""
    limit: int | None


def read(message: str) -> Overflow:
    """The numbers in an engine's ``message``."""
    return Overflow(_number(_PROMPT, message), _number(_OUTPUT, message), _number(_LIMIT, message))


def openai(message: str) -> str:
    found = read(message)
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


def anthropic(message: str) -> str:
    found = read(message)
    if found.prompt is None or found.limit is None:
        return f"prompt is too long: {message}"
    if found.output is not None and found.prompt <= found.limit:
        return (
            f"input length and `max_tokens` exceed context limit: {found.prompt} + "
            f"{found.output} > {found.limit}, decrease input length or `max_tokens` and try again"
        )
    return f"prompt is too long: {found.prompt} tokens > {found.limit} maximum"


def google(message: str) -> str:
    found = read(message)
    if found.prompt is None or found.limit is None:
        return f"The input token count exceeds the maximum number of tokens allowed. {message}"
    used = found.prompt + (found.output or 0) if found.prompt <= found.limit else found.prompt
    return (
        f"The input token count ({used}) exceeds the maximum number of tokens allowed "
        f"({found.limit})."
    )


def _number(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return int(next(group for group in found.groups() if group)) if found else None
