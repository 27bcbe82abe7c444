"""Hermes tool calls: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` in a reply's text.

The parser is online: what it emits for a text does not depend on how the text was cut. A call's
name is emitted when its arguments object opens, then the arguments verbatim as they arrive. A body
that is not a call comes out as the content text that it was. Arguments are not checked inside: once
the object has opened, they are the model's own text up to its closing brace or ``</tool_call>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from bridle.engine.serve.deltas import Content, Delta, ToolArguments, ToolName
from bridle.engine.serve.stopping import partial_suffix

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"

_ENVELOPE: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)+")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL
)


@dataclass(slots=True)
class _Call:
    """A ``<tool_call>`` whose end has not come yet."""

    body: str = ""
    """All of its text, until the arguments have opened; then nothing is kept."""
    index: int | None = None
    """Set once the name was emitted."""
    arguments: _ObjectScanner = field(default_factory=lambda: _ObjectScanner())


class HermesParser:
    """Folds reply text into content and tool-call deltas."""

    def __init__(self) -> None:
        self._buffer = ""
        self._call: _Call | None = None
        self._calls = 0
        self._after_call = False
        """Blank text after a call is markup, unless content follows."""

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        return [*self._drain()]

    def flush(self) -> list[Delta]:
        """The end of the reply: an unfinished call is judged as it stands."""
        deltas: list[Delta] = []
        rest, self._buffer = self._buffer, ""
        if self._call is None:
            deltas += self._content(rest)
        else:
            call, self._call = self._call, None
            deltas += self._extend(call, rest)
            deltas += self._judge(call, closing="")
        return deltas

    def _drain(self) -> Iterator[Delta]:
        while True:
            if self._call is None:
                before, tag, after = self._buffer.partition(OPEN)
                if not tag:
                    yield from self._release_content()
                    return
                yield from self._content(before)
                self._buffer, self._call = after, _Call()
            else:
                before, tag, after = self._buffer.partition(CLOSE)
                if not tag:
                    held = partial_suffix(self._buffer, CLOSE)
                    safe = len(self._buffer) - held
                    body, self._buffer = self._buffer[:safe], self._buffer[safe:]
                    yield from self._extend(self._call, body)
                    return
                call, self._call = self._call, None
                self._buffer = after
                yield from self._extend(call, before)
                yield from self._judge(call, closing=CLOSE)

    def _release_content(self) -> Iterator[Delta]:
        safe = len(self._buffer) - partial_suffix(self._buffer, OPEN)
        if self._after_call and not self._buffer[:safe].strip():
            return
        text, self._buffer = self._buffer[:safe], self._buffer[safe:]
        yield from self._content(text)

    def _content(self, text: str) -> Iterator[Delta]:
        if text and not (self._after_call and not text.strip()):
            self._after_call = False
            yield Content(text)

    def _extend(self, call: _Call, text: str) -> Iterator[Delta]:
        if call.index is None:
            call.body += text
            envelope = _ENVELOPE.match(call.body)
            name = _json(envelope["name"]) if envelope else None
            if envelope is None or not _is_text(name):
                return
            text = call.body[envelope.end() :]
            call.index = self._next_index()
            yield ToolName(call.index, name)
        arguments = call.arguments.push(text)
        if arguments:
            yield ToolArguments(call.index, arguments)

    def _judge(self, call: _Call, *, closing: str) -> Iterator[Delta]:
        """A whole body that did not show itself as a call while it arrived."""
        if call.index is not None:
            self._after_call = True
            return
        found = _whole_call(call.body)
        if found is None:
            yield from self._content(OPEN + call.body + closing)
            return
        name, arguments = found
        index = self._next_index()
        self._after_call = True
        yield ToolName(index, name)
        yield ToolArguments(index, arguments)

    def _next_index(self) -> int:
        self._calls += 1
        return self._calls - 1


class _ObjectScanner:
    """Passes text on until the JSON object that it opens with has closed."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._closed = False

    def push(self, text: str) -> str:
        if self._closed:
            return ""
        for position, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._closed = True
                    return text[: position + 1]
        return text


def _whole_call(body: str) -> tuple[str, str] | None:
    """Name and arguments of a body in any key order; ``None`` when it is not a call."""
    parsed = _json(body)
    if not isinstance(parsed, dict) or not _is_text(parsed.get("name")):
        return None
    arguments = parsed.get("arguments")
    if isinstance(arguments, str) and isinstance(_json(arguments), dict):
        return (parsed["name"], arguments) if _is_text(arguments) else None
    if not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    return parsed["name"], text if _is_text(text) else json.dumps(arguments)


def _json(text: str) -> Any:
    """Parsed JSON, or ``None`` when it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_text(value: Any) -> TypeGuard[str]:
    """A non-empty string that UTF-8 can carry (JSON escapes can spell lone surrogates)."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
