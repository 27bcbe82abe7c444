"""The numbers in an engine's context-overflow message, for providers whose words carry them.

Harnesses match a provider's exact words to decide between compacting, asking for fewer tokens and
giving up, so an engine's sentence is never passed on as it is.
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
    """What did not fit; each part is ``None`` when the message does not tell."""

    prompt: int | None
    output: int | None
    limit: int | None


def read(message: str) -> Overflow:
    """Prompt tokens, asked-for output tokens and the limit that ``message`` names."""
    return Overflow(_number(_PROMPT, message), _number(_OUTPUT, message), _number(_LIMIT, message))


def _number(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return int(next(group for group in found.groups() if group)) if found else None
