"""The JSON arguments, as they arrive, of calls whose markup has one element for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridle.engine.serve.deltas import Delta
from bridle.engine.serve.markup.calls import Calls, parsed, written
from bridle.engine.serve.markup.reading import Feed, Reading

_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}
"""The values of words that Python and JSON spell differently, or that templates write in lower
case."""


class ArgumentsWriter:
    """A writer of the arguments of one call of ``tool``, parameter by parameter."""

    def __init__(self, calls: Calls, tool: str) -> None:
        self._calls = calls
        self._tool = tool
        self._opened = False

    def parameter(
        self, feed: Feed, name: str, ends: Sequence[str], *, string: bool | None = None
    ) -> Reading[str]:
        """Read a parameter's value up to one of ``ends``.

        Return that end, or "" if the reply ends before it.

        ``string`` states whether the value is text; if it is ``None``, the tool's schema decides.
        Text is emitted as it comes. Any other value is emitted when it is complete, and as text if
        it is not JSON.
        """
        types = self._calls.types(self._tool, name)
        if string is None and types:
            string = types == {"string"}
        yield from self._calls.arguments((", " if self._opened else "{") + written(name) + ": ")
        self._opened = True
        if string:
            yield from self._calls.arguments('"')
            _, end = yield from feed.until(ends, emit=self._text)
            yield from self._calls.arguments('"' if end else "")
            return end
        value, end = yield from feed.until(ends)
        if end:
            yield from self._calls.arguments(_value(value, types))
        return end

    def close(self) -> Sequence[Delta]:
        return tuple(self._calls.arguments("}" if self._opened else "{}"))

    def _text(self, text: str) -> Sequence[Delta]:
        return tuple(self._calls.arguments(written(text)[1:-1]))


def _value(text: str, types: frozenset[str]) -> str:
    bare = text.strip()
    if "string" in types and not ("null" in types and bare in ("null", "None")):
        return written(text)
    if bare.lower() in _WORDS and (types or bare == bare.lower()):
        return written(_WORDS[bare.lower()])
    return bare if parsed(bare) is not None else written(text)
