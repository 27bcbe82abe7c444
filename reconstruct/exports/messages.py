"""Chat messages as other formats need them: plain text, reasoning, calls with parsed arguments.

A recorded reply keeps the newlines that chat templates write themselves: one inside each thinking
tag, two behind them, one before a tool call. They are left out here, to be rendered once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from bridle.reconstruct.conversation import ChatMessage
from bridle.reconstruct.exports.lines import Inexpressible

_LONG_INTEGER: Final = re.compile(r"\d{19}")


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A tool call with its arguments parsed."""

    id: str
    name: str
    arguments: dict[str, Any]


def text(message: ChatMessage) -> str:
    """Return the message's text. Raise :class:`Inexpressible` for pictures, sound and files."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") not in ("text", "input_text", "output_text") for part in content):
            raise Inexpressible("content_not_text")
        content = "\n".join(part["text"] for part in content)
    if reasoning(message) is not None:
        content = content.removeprefix("\n").removeprefix("\n")
    return content.removesuffix("\n") if message.get("tool_calls") else content


def reasoning(message: ChatMessage) -> str | None:
    """Return the model's reasoning before the message, or ``None`` if it has none.

    It is empty if the model opened and closed its reasoning at once.
    """
    thought: str = message.get("reasoning") or message.get("reasoning_content") or ""
    return thought.removeprefix("\n").removesuffix("\n") if thought else None


def tool_calls(message: ChatMessage) -> list[ParsedToolCall]:
    """Return the message's tool calls.

    Raise :class:`Inexpressible` if the sampled arguments are not a JSON object, or hold an integer
    that is too long to be written exactly.
    """
    return [
        ParsedToolCall(call.get("id", ""), call["function"]["name"], _arguments(call["function"]))
        for call in message.get("tool_calls") or ()
    ]


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        written = arguments
        try:
            arguments = orjson.loads(written)
        except orjson.JSONDecodeError:
            raise Inexpressible("tool_arguments_not_json") from None
        # orjson reads an integer of more than 64 bits as a float, which is another number.
        if _LONG_INTEGER.search(written) and json.loads(written) != arguments:
            raise Inexpressible("tool_arguments_not_exact")
    if not isinstance(arguments, dict):
        raise Inexpressible("tool_arguments_not_json")
    return arguments
