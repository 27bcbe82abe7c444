"""The input of a freeform tool, read from the function arguments that carry it as they arrive.

The engine produces ``{"input": "…"}`` in pieces, and the client wants the text inside in pieces.
Arguments of any other shape are passed on whole at the end.
"""

from __future__ import annotations

import json
import re
from typing import Final

_OPENING: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS: Final = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_HIGH_SURROGATE: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


class InputText:
    """Takes pieces of arguments and returns the input's text as far as it is certain."""

    __slots__ = ("_arguments", "_position", "_text")

    def __init__(self) -> None:
        self._arguments = ""
        self._position: int | None = None
        self._text: list[str] = []

    def feed(self, piece: str) -> str:
        """The text that ``piece`` makes certain; often empty, always final."""
        self._arguments += piece
        if self._position is None:
            opening = _OPENING.match(self._arguments)
            if opening is None:
                return ""
            self._position = opening.end()
        found = _CHARACTERS.match(self._arguments, self._position)
        certain = found.group() if found is not None else ""
        certain = _without_half_pair(certain)
        self._position += len(certain)
        text = _unescaped(certain)
        self._text.append(text)
        return text

    def finish(self) -> str:
        """The text that is left when no more pieces come: all of it for unusual arguments."""
        if self._position is not None:
            return ""
        text = _input_of(self._arguments)
        self._text.append(text)
        return text

    @property
    def text(self) -> str:
        """The whole input so far."""
        return "".join(self._text)


def _without_half_pair(characters: str) -> str:
    """``characters`` less a last escape that needs the next one to be a character."""
    half = _HIGH_SURROGATE.search(characters)
    if half is None:
        return characters
    before = characters[: half.start()]
    escaped = (len(before) - len(before.rstrip("\\"))) % 2 == 1
    return characters if escaped else before


def _unescaped(characters: str) -> str:
    """JSON string characters as text; halves of surrogate pairs become U+FFFD."""
    text: str = json.loads(f'"{characters}"', strict=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _input_of(arguments: str) -> str:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, dict) and isinstance(value.get("input"), str):
        text: str = value["input"]
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return arguments
